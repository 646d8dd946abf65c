"""`dataset trace` and `lineage` on a real server: records in any form, and refusals."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from tests.support.api.dataset_family import made_into_a_model_and_a_child
from tests.support.cli.command_line import refusal, run
from tests.support.resources.lineage import World
from tests.support.server_process import ServerProcess

ROWS = [{"instruction": f"What is {n}?", "answer": f"The number [{n}]"} for n in range(5)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        made = run(process.url, "dataset", "create", "--name", "corpus", "--path", str(path))
        assert made.returncode == 0, made.stderr
        yield process


@pytest.fixture(scope="module")
def learned(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return a record of d@1, which a run and its served model learned."""
    database = Database(server.settings.database_url)
    world = World(database, Store(server.settings.store), tmp_path_factory.mktemp("world"))
    version = made_into_a_model_and_a_child(world)
    world.deploy("m", 1, promotion=1)
    train = Datasets(database).read(version.reference, "default").split("train")
    database.close()
    row: dict[str, object] = json.loads(next(iter(iterate_record_lines(world.store, train))))
    return row


def test_a_record_of_a_file_is_traced(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(dict(reversed(ROWS[3].items())), indent=2))
    done = run(server.url, "dataset", "trace", "--record", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "dataset version corpus@1 record 4; the same record" in done.stdout
    assert "1 dataset version, 0 splits, 0 runs" in done.stdout
    traced = json.loads(run(server.url, "dataset", "trace", "--record", str(file), "--json").stdout)
    assert (traced["found"], traced["live"]) == (True, [])


def test_each_line_of_a_file_is_traced_as_a_record(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps({"run_id": "nobody's", "text": "[/red] elsewhere"}) + "\n")
    done = run(server.url, "dataset", "trace", "--record", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("corpus@1") == 1 and done.stdout.count("no version holds this record") == 1
    assert "[/red] elsewhere" in done.stdout


def test_matching_text_is_traced_in_all_records_containing_it(server: ServerProcess) -> None:
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


def test_trace_without_a_usable_record_or_text_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    assert "--record FILE or --match TEXT" in refusal(run(server.url, "dataset", "trace"))
    assert "cannot be read" in refusal(run(server.url, "dataset", "trace", "--record", str(tmp_path / "absent")))
    assert "the text to match is empty" in refusal(run(server.url, "dataset", "trace", "--match", " "))


def test_data_of_a_missing_model_version_is_refused(server: ServerProcess) -> None:
    assert "nothing" in refusal(run(server.url, "model", "data", "nothing", "1"))


def test_record_is_traced_to_run_model_and_deployment(
    server: ServerProcess, learned: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(learned))
    done = run(server.url, "dataset", "trace", "--record", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    (_, *tree, counts) = (line.lstrip(" │├└─") for line in done.stdout.splitlines())
    reached = ["dataset version d@1 record", "split d@1 train record", "run r1 trained on it", "m version 1 learned from it"]
    assert [line.startswith(begin) for begin, line in zip(reached, tree, strict=False)] == [True] * 4, done.stdout
    assert re.fullmatch(r"deployment .*serving since \d{4}-\d\d-\d\d \d\d:\d\d UTC", tree[4]) and len(tree) == 5
    assert counts.endswith("1 dataset version, 1 split, 1 run, 1 model version, 1 deployment; served now: m version 1")


def test_lineage_of_a_version_is_printed_in_both_directions(server: ServerProcess, learned: dict[str, object]) -> None:
    done = run(server.url, "dataset", "lineage", "d@1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    here = next(number for number, line in enumerate(lines) if line.startswith("d@1  (transform: "))
    assert [line.split(" at ")[0] for line in lines[:here]] == ["  ↑ source"]
    below = lines[here + 1 :]
    assert below[0] == "  ↓ dataset child@1" and below.count("  ↓ run r1") == 1
    assert {f"  ↓ {kind} at s3://hanzo-models/m/r1/{kind}" for kind in ("merged", "gguf")} <= set(below)
    child = run(server.url, "dataset", "lineage", "child@1").stdout.splitlines()
    assert child[0] == "  ↑ dataset d@1" and "child@1  (transform: cut)" in child
