"""`hanzo-ml dataset` beyond create: exact files are downloaded, also after an interruption."""

import hashlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from hanzo_ml.cli.dataset_checkout import MAX_TRIES, CheckoutError, FilePart, RemoteFile, checkout_files
from tests.support.cli.command_line import cli
from tests.support.server_process import ServerProcess

__all__ = ["cli"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]
LINES = "".join(
    json.dumps({"id": number, "text": " ".join(map(str, random.Random(number).choices(range(5000), k=300)))}) + "\n"
    for number in range(3000)
)


@pytest.mark.requirement("B10")
def test_version_is_checked_out_exactly_and_refused_into_a_filled_folder(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.jsonl").write_text(LINES)
    (folder / "inner" / "b.jsonl").write_text('{"id":   1}\n')
    assert cli("dataset", "create", "--name", "out", "--path", str(folder), "--metadata", "pii=false").returncode == 0
    to = tmp_path / "to"
    done = cli("dataset", "checkout", "out@1", "--to", str(to))
    assert done.returncode == 0, done.stderr
    for name in ("a.jsonl", "inner/b.jsonl"):
        assert (to / name).read_bytes() == (folder / name).read_bytes()
    again = cli("dataset", "checkout", "out@1", "--to", str(to))
    assert again.returncode == 1 and "exists and is not empty" in again.stderr
    for options, reason in (
        (["--split", "test"], "no split 'test' yet"),
        (["--split", "test", "--records"], "exclude each other"),
        (["--rejected"], "was not prepared"),
    ):
        assert reason in cli("dataset", "checkout", "out@1", "--to", str(tmp_path / "none"), *options).stderr
    shown = json.loads(cli("dataset", "show", "out").stdout)
    assert (shown["metadata"], shown["num_records"]) == ({"pii": False}, 3001)
    assert len(cli("dataset", "preview", "out@1", "-n", "2").stdout.splitlines()) == 2
    (folder / "inner" / "b.jsonl").write_text('{"id": 2}\n')
    cli("dataset", "create", "--name", "out", "--path", str(folder))
    assert "1 added, 1 removed" in cli("dataset", "diff", "out@1", "out@2").stdout
    assert "confirm with --yes" in cli("dataset", "delete", "out@2").stderr
    assert cli("dataset", "delete", "out@2", "--yes").stdout == "out@2 is deleted\n"
    assert "there is no dataset 'out@2'" in cli("dataset", "show", "out@2").stderr


@pytest.mark.requirement("B7")
def test_preview_prints_records_with_escaped_control_characters(cli: Cli, tmp_path: Path) -> None:
    """JSON leaves U+007F and U+009B unescaped."""
    record = {"text": "ü\x1b[2J\x9b2J\x7f"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(record))
    assert cli("dataset", "create", "--name", "odd", "--path", str(tmp_path / "odd.jsonl")).returncode == 0
    said = cli("dataset", "preview", "odd@1").stdout
    assert json.loads(said) == record and not {each for each in said if not each.isprintable()} - {"\n"}, said


def test_incomplete_reference_is_refused_by_delete(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    cli("dataset", "create", "--name", "half", "--path", str(tmp_path / "a.jsonl"))
    for reference in ("@1", "half@", "half@x", ""):
        done = cli("dataset", "delete", reference, "--yes")
        assert done.returncode == 1 and "is not a dataset: write NAME or NAME@VERSION, such as" in done.stderr
    assert cli("dataset", "show", "half@1").returncode == 0


@pytest.fixture
def remote(server: ServerProcess, cli: Cli, tmp_path: Path) -> RemoteFile:
    (tmp_path / "a.jsonl").write_text(LINES)
    cli("dataset", "create", "--name", "parts", "--path", str(tmp_path / "a.jsonl"))
    (file,) = json.loads(cli("dataset", "download", "parts@1", "--json").stdout)["files"]
    found = RemoteFile.from_json(file)
    assert len(found.parts) > 2
    return found


def test_an_interrupted_checkout_fetches_only_what_is_missing(remote: RemoteFile, tmp_path: Path) -> None:
    gone = [FilePart("http://127.0.0.1:9/", part.sha256, part.size) for part in remote.parts[:2]]
    unfinished = tmp_path / ".to.mark.part" / remote.path
    unfinished.parent.mkdir()
    have = sum(part.size for part in remote.parts[:2])
    unfinished.write_bytes(LINES.encode()[:have] + b"half of the next")
    (unfinished.parent / "of another version").write_text("x")
    resumed = RemoteFile(remote.path, remote.sha256, remote.size, (*gone, *remote.parts[2:]))
    assert checkout_files(lambda: [resumed], tmp_path / "to", "mark") == remote.size
    assert (tmp_path / "to" / remote.path).read_text() == LINES
    assert [path.name for path in (tmp_path / "to").iterdir()] == [remote.path]


@pytest.mark.parametrize("wrong", ["part", "file", "name"])
def test_checkout_with_a_wrong_hash_or_name_creates_no_folder(remote: RemoteFile, tmp_path: Path, wrong: str) -> None:
    first, second, *rest = remote.parts
    parts = (FilePart(second.url, first.sha256, first.size), second, *rest) if wrong == "part" else remote.parts
    path = "../outside" if wrong == "name" else remote.path
    file = RemoteFile(path, "0" * 64 if wrong == "file" else remote.sha256, remote.size, parts)
    with pytest.raises(CheckoutError):
        checkout_files(lambda: [file], tmp_path / "to", "mark")
    assert not (tmp_path / "to").exists() and not (tmp_path / "outside").exists()


def test_expired_urls_are_requested_again(remote: RemoteFile, tmp_path: Path) -> None:
    expired = [FilePart(part.url[:-4] + "0000", part.sha256, part.size) for part in remote.parts]
    answers: list[Any] = [RemoteFile(remote.path, remote.sha256, remote.size, expired), remote]
    assert checkout_files(lambda: [answers.pop(0)], tmp_path / "to", "mark") == remote.size
    with pytest.raises(CheckoutError, match="refused"):
        stale = RemoteFile(remote.path, remote.sha256, remote.size, expired)
        checkout_files(lambda: [stale], tmp_path / "other", "mark")


def test_concurrent_checkout_into_the_same_folder_is_refused(remote: RemoteFile, tmp_path: Path) -> None:
    """Of any version: both would be stored under the same name."""
    refused = []

    def links() -> list[RemoteFile]:
        with pytest.raises(CheckoutError, match=r"another checkout into .* is running") as problem:
            checkout_files(lambda: [remote], tmp_path / "to", "other mark")
        refused.append(problem)
        return [remote]

    assert checkout_files(links, tmp_path / "to", "mark") == remote.size
    assert len(refused) == 1 and (tmp_path / "to" / remote.path).read_text() == LINES
    assert not list(tmp_path.glob(".to.*")), "no .part or .lock is left"
    with pytest.raises(CheckoutError, match="exists and is not empty"):
        checkout_files(lambda: [remote], tmp_path / "to", "mark")


class Breaking(BaseHTTPRequestHandler):
    """Serves ranges, and disconnects after some bytes; sends nothing at all from `silent_from` on."""

    content = LINES.encode()
    after = len(content) // 3
    silent_from: ClassVar[int] = len(content)
    expires_after: ClassVar[int] = 1000
    """Number of requests before an address expires."""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.headers["Range"])
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        if len(self.asked) % (self.expires_after + 1) == 0:
            self.send_error(403)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(len(self.content) - start if start < self.silent_from else 0))
        self.end_headers()
        self.wfile.write(self.content[start : min(start + self.after, self.silent_from)])


@pytest.fixture
def breaking() -> Iterator[RemoteFile]:
    """Serve a file in one part, like those of splits, with disconnections."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        Thread(target=server.serve_forever).start()
        Breaking.asked.clear()
        sha256, size = hashlib.sha256(Breaking.content).hexdigest(), len(Breaking.content)
        yield RemoteFile("a.jsonl", sha256, size, (FilePart(f"http://127.0.0.1:{server.server_port}/", sha256, size),))
        server.shutdown()


def test_interrupted_part_download_resumes_at_its_offset(breaking: RemoteFile, tmp_path: Path) -> None:
    assert checkout_files(lambda: [breaking], tmp_path / "to", "mark") == breaking.size
    assert (tmp_path / "to" / "a.jsonl").read_text() == LINES
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in Breaking.asked]
    assert starts == [0, Breaking.after, 2 * Breaking.after, 3 * Breaking.after][: len(starts)] and len(starts) >= 3


def test_download_without_progress_is_given_up(
    breaking: RemoteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaking, "silent_from", 1000)
    with pytest.raises(CheckoutError, match="came as an answer without bytes"):
        checkout_files(lambda: [breaking], tmp_path / "to", "mark")
    assert Breaking.asked == ["bytes=0-", *["bytes=1000-"] * MAX_TRIES]
    monkeypatch.undo()
    assert checkout_files(lambda: [breaking], tmp_path / "to", "mark") == breaking.size, "what came is kept"
    assert Breaking.asked[1 + MAX_TRIES] == "bytes=1000-"


def test_download_survives_repeated_url_expiry_while_it_makes_progress(
    breaking: RemoteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Breaking, "expires_after", 1)
    monkeypatch.setattr(Breaking, "after", breaking.size // (2 * MAX_TRIES))
    assert checkout_files(lambda: [breaking], tmp_path / "to", "mark") == breaking.size
    assert (tmp_path / "to" / "a.jsonl").read_text() == LINES
    monkeypatch.setattr(Breaking, "expires_after", 0)
    with pytest.raises(CheckoutError, match="refused"):
        checkout_files(lambda: [breaking], tmp_path / "other", "mark")


@pytest.mark.parametrize("wrong", [False, True])
def test_partial_download_is_reused_unless_corrupt(breaking: RemoteFile, tmp_path: Path, wrong: bool) -> None:
    unfinished = tmp_path / ".to.mark.part" / breaking.path
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"x" * 1000 if wrong else Breaking.content[:1000])
    checkout_files(lambda: [breaking], tmp_path / "to", "mark")
    assert (tmp_path / "to" / "a.jsonl").read_text() == LINES
    assert Breaking.asked[0] == "bytes=1000-" and ("bytes=0-" in Breaking.asked) == wrong
