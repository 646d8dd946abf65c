"""Version creation from raw files: errors name the line, refusals leave nothing, content is deduplicated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.records.record_reader import iterate_record_lines, read_records
from resources.lineage.edges import find_artifact, parent_digests
from resources.metadata.datasets import Datasets
from resources.metadata.outbox import read_after
from tests.support.resources.dataset_versions import Place, lines

ROOT = Path(__file__).resolve().parents[3]
GOOD = '{"instruction": "Who?", "answer": "She."}\n'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"instruction": "x", "answer": }', "not JSON (Expecting value, column 32)"),
        ('["x", "y"]', "not a JSON object"),
        ("just words", "not JSON (Expecting value, column 1)"),
        (b'{"instruction": "f\xfcr", "answer": "x"}', "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named_by_number_and_reason(place: Place, bad: str | bytes, reason: str) -> None:
    raw = bad if isinstance(bad, bytes) else bad.encode()
    message = place.refusal(GOOD.encode() * 2 + raw + b"\n" + GOOD.encode())
    assert f"raw.jsonl, line 3: {reason}" in message
    assert "Nothing was stored" in message


@pytest.mark.parametrize("document", ['[{"a": 1}, {"a": 2}]', '[\n {"a": 1}\n]', '\ufeff{\n "a": 1\n}', "[[1], [2]]"])
def test_single_json_document_is_rejected_with_the_command_to_convert_it(place: Place, document: str) -> None:
    message = place.refusal(document.encode())
    assert message.startswith("raw.jsonl is one JSON document over all its lines: write one object a line, as `jq")
    assert message.count("raw.jsonl") == 1


LEGAL_TO_PYTHON_ONLY: dict[str, bytes] = {
    "NaN": b'{"instruction": "x", "answer": "y", "score": NaN}',
    "infinity": b'{"instruction": "x", "answer": "y", "score": -Infinity}',
    "half a character": b'{"instruction": "x", "answer": "\\ud800"}',
    "an endless number": b'{"instruction": "x", "answer": "y", "n": ' + b"1" * 5000 + b"}",
    "a deep nest": b'{"instruction": "x", "answer": "y", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("what", LEGAL_TO_PYTHON_ONLY)
def test_python_only_json_is_refused_by_line(place: Place, what: str) -> None:
    assert "raw.jsonl, line 2: " in place.refusal(GOOD.encode() + LEGAL_TO_PYTHON_ONLY[what] + b"\n")


def test_any_object_is_a_record(place: Place) -> None:
    """The dataset's contract and the training check what training needs."""
    version, _ = place.create('{"prompt": [1, {"b": 1, "a": null}]}\n{}\n{"prompt": 2.50, "key": 1412}\n')
    assert version.num_records == 3
    assert version.schema == {"key": "integer?", "prompt": "array|number?"}
    folder = place.store.fetch(version.artifact, place.folder)
    assert (folder / "records-00000.jsonl").read_text() == '{"prompt":[1,{"a":null,"b":1}]}\n{}\n{"key":1412,"prompt":2.5}\n'


def test_the_first_bad_lines_are_shown_and_the_others_counted(place: Place) -> None:
    message = place.refusal("7\n" * 10)
    assert "line 1:" in message and "line 3:" in message and "line 4:" not in message
    assert "(and 7 more)" in message


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(place: Place, content: str) -> None:
    assert "raw.jsonl is empty: a dataset needs at least one record" in place.refusal(content)


def test_empty_files_are_skipped_and_listed_unless_all_are_empty(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "b.jsonl").write_text("")
    (folder / "c.jsonl").write_text("\n \n")
    assert "b.jsonl is empty: a dataset needs at least one record; c.jsonl is empty" in place.refusal(folder)
    (folder / "a.jsonl").write_text(GOOD)
    version, _ = place.create(folder)
    assert version.lineage["skipped"] == ["b.jsonl", "c.jsonl"]
    assert version.num_records == len(GOOD.splitlines())


def test_missing_file_is_refused_by_name(place: Place, tmp_path: Path) -> None:
    assert "there is no file or folder nothing.jsonl" in place.refusal(tmp_path / "nothing.jsonl")
    (tmp_path / "bare").mkdir()
    assert "folder bare holds no *.jsonl file" in place.refusal(tmp_path / "bare")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a..b", "a b", "-x", "ä" * 300, "a\n"])
def test_dataset_name_that_is_invalid_in_a_path_is_refused(place: Place, name: str) -> None:
    assert "is not allowed" in place.refusal(GOOD, name=name)


def test_unknown_format_is_refused(place: Place) -> None:
    assert "format 'xml' is not supported: use jsonl, parquet, csv, arrow, text" in place.refusal(GOOD, format="xml")


@pytest.mark.requirement("B2")
def test_version_describes_its_content_and_keeps_the_uploaded_bytes(place: Place) -> None:
    version, is_new = place.create(lines(3) + '{"instruction": "x", "answer": "y", "tag": 1}\n', tags=["t"])
    assert is_new
    assert (version.reference, version.num_records, version.format) == ("d@1", 4, "jsonl")
    assert version.schema == {"answer": "string", "instruction": "string", "tag": "integer?"}
    assert version.storage_path == "s3://hanzo-ml/datasets/d/1/"
    raw = (place.source(version) / "raw.jsonl").read_bytes()
    assert raw == (place.folder / "raw.jsonl").read_bytes()
    assert version.size_bytes == len(raw)
    assert len(read_records(place.store.fetch(version.artifact, place.folder))) == 4
    assert Datasets(place.database).read("d", "default") == version


@pytest.mark.requirement("B9")
def test_the_lineage_goes_from_the_records_to_the_source_files(place: Place) -> None:
    version, _ = place.create(lines(3))
    with place.database.read() as connection:
        above = parent_digests(connection, version.artifact.digest)
        source = find_artifact(connection, above["source"])
    assert source is not None and source.uri == f"s3://hanzo-ml/datasets/d/1/{version.id[:8]}/source"
    assert place.store.manifest(version.artifact).inputs == above


def test_equal_content_returns_the_existing_version(place: Place) -> None:
    first, _ = place.create(lines(3))
    second, is_new = place.create(lines(3).replace('": "', '":    "').replace("\n", "\n\n"))
    assert (second, is_new) == (first, False)
    with place.database.read() as connection:
        assert [event.type for event in read_after(connection, 0)] == ["dataset.created"]


@pytest.mark.requirement("B1")
def test_changed_content_creates_the_next_version_and_keeps_the_first(place: Place) -> None:
    first, _ = place.create(lines(3))
    second, is_new = place.create(lines(4))
    assert is_new and second.version == 2
    place.store.fetch(first.artifact, place.folder)
    assert place.create(lines(3)) == (first, False)


CREATE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.resources.dataset_versions import Place, lines
place = Place.__new__(Place)
from recipes.contracts.job import StoreAddress
from recipes.storage.artifact_store import Store
from resources.metadata.database import Database
from tests.support.resources.dataset_versions import BUCKETS
folder = Path(sys.argv[2])
place.folder = Path(sys.argv[3])
place.database = Database(f"sqlite:///{folder}/metadata.db")
place.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
sys.stdin.readline()
for number in range(6):
    version, is_new = place.create(lines(3, number))
    print(version.reference, version.content_sha256, is_new)
"""


@pytest.mark.slow
def test_concurrent_processes_create_one_version_per_content(place: Place) -> None:
    folders = [place.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, str(ROOT), str(place.folder), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    answers = [process.communicate("go\n")[0].splitlines() for process in processes]
    assert [len(answer) for answer in answers] == [6, 6]
    created = [line for answer in answers for line in answer if line.endswith("True")]
    assert len(created) == 6
    versions = Datasets(place.database).list("default")
    assert [version.version for version in versions] == [1, 2, 3, 4, 5, 6]
    assert len({version.content_sha256 for version in versions}) == 6
    for version in versions:
        place.store.fetch(version.artifact, place.folder)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from recipes.storage.artifact_store import Store
from tests.support.resources.dataset_versions import Place, lines
place = Place(Path(sys.argv[2]))
real = Store.put_bytes
def killed(self, uri, data):
    real(self, uri, data)
    os.kill(os.getpid(), signal.SIGKILL)
Store.put_bytes = killed
place.create(lines(9))
"""


def test_a_kill_halfway_records_nothing_and_the_next_attempt_succeeds(place: Place) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(ROOT), str(place.folder)], check=False)
    assert done.returncode == -9
    assert Datasets(place.database).list("default") == []
    version, is_new = place.create(lines(9))
    assert is_new and version.version == 1
    place.store.fetch(version.artifact, place.folder)


def test_two_organizations_with_a_dataset_of_one_name_do_not_overwrite_each_other(place: Place) -> None:
    first, _ = place.create(lines(3), organization="research")
    place.create(lines(5), organization="community")
    place.store.fetch(first.artifact, place.folder)


def test_carriage_return_between_json_tokens_is_whitespace(place: Place) -> None:
    version, _ = place.create(b'{"instruction": "x",\r "answer": "y"}\r\n' + GOOD.encode())
    assert version.num_records == 2


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_records_with_rare_line_separators_can_be_read_again(place: Place, separator: str) -> None:
    text = json.dumps({"instruction": f"one{separator}two", "answer": "x"}, ensure_ascii=False)
    version, _ = place.create(text + "\n")
    (found,) = read_records(place.store.fetch(version.artifact, place.folder))
    assert found.instruction == f"one{separator}two"


def test_byte_order_mark_is_accepted(place: Place) -> None:
    version, _ = place.create(b"\xef\xbb\xbf" + GOOD.encode() * 2)
    assert version.num_records == 2


REPEATED: dict[str, str] = {
    "of the record": '{"text": "lost", "text": "kept"}',
    "within a value": '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}',
    "without a text": '{"n": 1, "n": 2}',
    "next to escaped quotes": '{"n": 1, "n": "\\u0022\\u0022"}',
    "written in two ways": '{"text": "lost", "\\u0074ext": "kept"}',
}


@pytest.mark.parametrize("where", REPEATED)
def test_a_repeated_key_is_refused_since_one_of_its_values_would_be_lost(place: Place, where: str) -> None:
    message = place.refusal(f"{GOOD}{REPEATED[where]}\n")
    assert message.startswith("raw.jsonl, line 2: repeated key '") and "(and" not in message


@pytest.mark.parametrize(
    "line", ['{"text": "\\u0022 said"}', '{"a": {"text": 1}, "text": 2}', '{"": "", "a": {}, "b": [{}]}']
)
def test_other_notations_of_a_record_are_not_taken_as_repeated_keys(place: Place, line: str) -> None:
    version, _ = place.create(line)
    assert [json.loads(each) for each in iterate_record_lines(place.store, version.artifact)] == [json.loads(line)]
