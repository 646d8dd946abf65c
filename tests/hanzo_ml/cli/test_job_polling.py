"""Waiting commands report once that no component processes the work, and continue waiting."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hanzo_ml.cli import job_polling
from hanzo_ml.cli.connection import call
from hanzo_ml.cli.job import logs
from hanzo_ml.cli.job_polling import describe_silence, poll_until
from tests.support.server_process import ServerProcess

OTHERS = {"name": "others", "beat_at": 1, "seconds_ago": 1.0}


@pytest.mark.parametrize(
    ("ago", "waited", "said"),
    [
        (2.0, 500.0, ""),
        (90.0, 5.0, ""),  # it may be starting
        (90.0, 31.0, "was last heard 90 s ago"),
        (None, 5.0, ""),
        (None, 31.0, "was never heard"),
    ],
)
def test_only_silent_sensors_are_reported(ago: float | None, waited: float, said: str) -> None:
    heard: list[dict[str, Any]] = [OTHERS] if ago is None else [OTHERS, {**OTHERS, "name": "sensors", "seconds_ago": ago}]
    note = describe_silence(heard, waited)
    assert said in note
    assert bool(note) == bool(said)
    assert "`hanzo-ml up`" in note or not said


def test_waiting_command_reports_silence_once_and_returns_the_answer(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANZO_ML_TRACKING_URI", server.url)
    monkeypatch.setattr(job_polling, "SILENCE_SECONDS", 0.0)
    monkeypatch.setattr(job_polling, "POLL_SECONDS", 0.001)
    answers: Iterator[str | None] = iter([None, None, None, "done"])
    assert poll_until(lambda: next(answers)) == "done"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("nothing starts this: Dagster's daemon was never heard") == captured.err.count("\n") == 1


@pytest.mark.requirement("S3")
def test_following_a_log_reports_the_state_of_a_queued_job(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANZO_ML_TRACKING_URI", server.url)
    monkeypatch.setattr(job_polling, "SILENCE_SECONDS", 0.0)
    monkeypatch.setattr(job_polling, "POLL_SECONDS", 0.01)
    job_id = call("POST", "/v1/jobs", json={"name": "n", "model": "some-model"})["id"]
    cancel = threading.Timer(0.5, lambda: call("POST", f"/v1/jobs/{job_id}/cancel"))
    cancel.start()
    logs(job_id, follow=True)
    cancel.join()
    captured = capsys.readouterr()
    assert captured.out == ""
    queued, silent = captured.err.splitlines()
    assert queued == f"{job_id} is queued: it starts within seconds, or when a running job ends"
    assert "nothing starts this" in silent


class QuietJob(BaseHTTPRequestHandler):
    """Serves the log of a job that was silent for a while."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            b": queued\n\n: running\n\ndata: epoch 1\n\ndata: : not a comment\n\nevent: end\ndata: completed\n\n"
        )

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a test's output is for its failures."""


def test_stream_comments_are_not_printed_as_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), QuietJob) as quiet:
        threading.Thread(target=quiet.serve_forever, daemon=True).start()
        monkeypatch.setenv("HANZO_ML_TRACKING_URI", f"http://127.0.0.1:{quiet.server_port}")
        logs("j")
        quiet.shutdown()
    assert capsys.readouterr().out == "epoch 1\n: not a comment\n"
