"""`dataset trace` against a real server: a record in any form, a text, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server_process import ServerProcess
from tests.hanzo_ml.test_cli import refusal, run

ROWS = [{"instruction": f"What is {n}?", "answer": f"The number [{n}]"} for n in range(5)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        made = run(process.url, "dataset", "create", "--name", "corpus", "--path", str(path))
        assert made.returncode == 0, made.stderr
        yield process


def test_a_record_of_a_file_is_traced(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(dict(reversed(ROWS[3].items())), indent=2))
    done = run(server.url, "dataset", "trace", "--record", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "dataset version corpus@1 record 4; the same record" in done.stdout
    assert "1 dataset version, 0 splits, 0 runs" in done.stdout
    traced = json.loads(run(server.url, "dataset", "trace", "--record", str(file), "--json").stdout)
    assert (traced["found"], traced["live"]) == (True, [])


def test_each_line_of_a_file_is_a_record(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps({"run_id": "nobody's", "text": "[/red] elsewhere"}) + "\n")
    done = run(server.url, "dataset", "trace", "--record", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("corpus@1") == 1 and done.stdout.count("no version holds this record") == 1
    assert "[/red] elsewhere" in done.stdout


def test_a_text_is_traced_in_all_records_that_say_it(server: ServerProcess) -> None:
    done = run(server.url, "dataset", "trace", "--match", "number [", "--limit", "2")
    assert done.stdout.count("dataset version corpus@1") == 2
    assert "5 matching records, 2 traced" in done.stdout
    nothing = run(server.url, "dataset", "trace", "--match", "never said")
    assert (nothing.returncode, nothing.stdout) == (0, "no version holds a record with this text\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1]", "holds no record"),
        ("", "holds no record"),
        ('{"a": 1}\n{"b": }\n', "line 2: not JSON"),
        ("{}\n" * 101, "trace at most 100 at a time"),
    ],
)
def test_a_file_without_records_is_refused(server: ServerProcess, tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "record.json"
    file.write_text(content)
    assert reason in refusal(run(server.url, "dataset", "trace", "--record", str(file)))


def test_what_to_trace_must_be_said_once(server: ServerProcess, tmp_path: Path) -> None:
    assert "--record FILE or --match TEXT" in refusal(run(server.url, "dataset", "trace"))
    assert "cannot be read" in refusal(run(server.url, "dataset", "trace", "--record", str(tmp_path / "absent")))
    assert "the text to match is empty" in refusal(run(server.url, "dataset", "trace", "--match", " "))


def test_data_of_a_version_that_is_not_there_is_refused(server: ServerProcess) -> None:
    assert "nothing" in refusal(run(server.url, "model", "data", "nothing", "1"))
