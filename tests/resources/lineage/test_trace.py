"""Record tracing: found everywhere it went and nowhere else, on both databases and stores."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import StoreAddress
from recipes.records import record_index
from recipes.records.fingerprint import encode_canonical_line
from recipes.records.record_index import find_index, index_uri
from recipes.records.record_reader import iterate_record_lines
from recipes.storage.artifact_store import Store
from recipes.storage.locations import chunk_uri
from recipes.storage.manifest import Artifact
from resources.lineage.edges import record_artifact
from resources.lineage.record_search import TextSearch, trace_matches
from resources.lineage.trace import TraceNode, Tracer, walk_nodes
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets
from resources.metadata.tracking.run_data import RunData
from tests.support.resources.lineage import BUCKETS, SPLITS, World, node, publish_index, rows, small
from tests.support.s3_server import VARIABLES, S3Server

__all__ = ["small"]


@pytest.fixture
def store(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Store:
    """A folder for SQLite, S3 for PostgreSQL: the two are independent."""
    if database_url.startswith("sqlite"):
        return Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    server: S3Server = request.getfixturevalue("s3")
    return Store(server.address, VARIABLES)


@pytest.fixture
def world(database: Database, store: Store, tmp_path: Path) -> World:
    return World(database, store, tmp_path)


def paths(nodes: Sequence[TraceNode], above: str = "") -> set[str]:
    """Return the path to every node, as kinds and names."""
    found = set()
    for each in nodes:
        path = f"{above}/{each.kind} {each.name}" if each.kind != "deployment" else f"{above}/{each.facts['status']}"
        found |= {path} | paths(each.reached, path)
    return found


def split_of(artifacts: Mapping[str, Artifact], store: Store, row: Mapping[str, Any]) -> str:
    """Find the split that holds a row by reading all of them."""
    for name, artifact in artifacts.items():
        if row in map(json.loads, iterate_record_lines(store, artifact)):
            return name
    raise AssertionError(f"no split holds {row}")


def test_record_is_traced_from_its_version_to_the_served_model(world: World) -> None:
    corpus = rows(40)
    version = world.create(corpus)
    splits = world.split(version)
    adapter = world.run("r1", version, splits)
    world.model("m", "r1", adapter)
    world.deploy("m", 1, promotion=1)
    world.run("r2", version, splits)
    by_split = {split_of(splits, world.store, row): (number, row) for number, row in enumerate(corpus, start=1)}
    assert set(by_split) == set(SPLITS)
    for split, (number, row) in by_split.items():
        found = world.trace(row)
        root = f"/dataset version d@1/split d@1 {split}"
        model = f"{root}/run r1/model version m version 1"
        wanted = {"/dataset version d@1", root, f"{root}/run r1", f"{root}/run r2", model, f"{model}/serving"}
        assert paths(found.reached) == wanted
        assert node(found, "m version 1").facts["learned"] == (split == "train")
        assert found.live == (["m version 1"] if split == "train" else [])
        used = {"train": "trained on it", "validation": "validated with it", "test": "tested with it"}[split]
        assert node(found, "r1").facts["used"] == [used]
        assert node(found, "d@1").facts["numbers"] == [number]
        assert node(found, "d@1").facts["how"] == ["the same record"]
        assert found.totals["split"] == 1


def test_new_version_has_a_record_index_and_is_traced_without_its_records(world: World) -> None:
    """Without an index, every query would read all records of all versions and still succeed."""
    corpus = rows(40)
    version = world.create(corpus)
    index = find_index(world.store, version.artifact)
    assert index is not None and sum(segment.count for segment in index.records) == 40
    for file in world.store.manifest(version.artifact).files:
        for chunk in file.chunks:
            world.store.remove(chunk_uri(version.artifact.uri, chunk.sha256))
    with pytest.raises(FileNotFoundError):
        list(iterate_record_lines(world.store, version.artifact))
    for number, row in enumerate(corpus, start=1):
        assert node(world.trace(row), "d@1").facts["numbers"] == [number]


def test_unknown_record_is_found_in_no_version(small: World) -> None:
    assert small.trace({"text": "nothing is there yet"}).found is False
    small.create(rows(3))
    found = small.trace({"instruction": "What is number 3?", "answer": "It is 3, naturally."})
    assert (found.found, found.reached, found.live) == (False, [], [])
    assert set(found.totals.values()) == {0}


@pytest.mark.parametrize(
    ("stored", "asked", "how"),
    [
        ({"b": {"d": 1.0, "c": [True]}, "a": "x"}, {"a": "x", "b": {"c": [True], "d": 1.0}}, "the same record"),
        ({"text": "Grüße, 世界 🌍"}, {"text": "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f30d"}, "the same record"),
        ({"text": "Grüße,  Welt!"}, {"text": "gru\u0308SSE Welt"}, "the same text"),
        ({"text": "\u201cNo\u201d \u2013 she said\u2026"}, {"text": "no she said ..."}, "the same text"),
        (
            {"instruction": "Who?", "answer": "She.", "key": "she"},
            {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "She"}]},
            "the same text",
        ),
        ({"prompt": "Who?", "completion": "She."}, {"instruction": "Who?", "answer": "She."}, "the same text"),
        ({"n": 1, "m": None}, {"m": None, "n": 1}, "the same record"),
    ],
)
def test_a_record_is_known_in_other_forms(small: World, stored: Any, asked: Any, how: str) -> None:
    small.create([*rows(5), stored])
    found = small.trace(asked)
    assert node(found, "d@1").facts | {"id": ""} == {"records": 1, "numbers": [6], "how": [how], "of_records": 6, "id": ""}


def test_records_that_differ_in_a_number_are_distinct(small: World) -> None:
    small.create([{"n": 1}, {"n": 2}])
    assert not small.trace({"n": 3}).found
    assert node(small.trace({"n": 2}), "d@1").facts["numbers"] == [2]


def test_a_record_that_occurs_twice_is_counted_twice(world: World) -> None:
    corpus = [*rows(30), *rows(1, first=7)]
    version = world.create(corpus)
    world.split(version)
    found = world.trace(corpus[7])
    assert node(found, "d@1").facts["numbers"] == [8, 31]
    split = next(node for node in walk_nodes(found.reached) if node.kind == "split")
    assert split.facts["records"] == 2


def test_trace_of_a_shared_record_is_limited_to_the_own_organization(world: World) -> None:
    corpus = rows(30)
    for organization, run, model in (("default", "r1", "m"), ("acme", "r2", "n")):
        version = world.create(corpus, organization=organization)
        adapter = world.run(run, version, world.split(version))
        world.model(model, run, adapter, organization)
    row = next(row for row in corpus if any(n.name == "m version 1" for n in walk_nodes(world.trace(row).reached)))
    mine = {n.name for n in walk_nodes(world.trace(row).reached) if n.kind in ("run", "model version")}
    others = {n.name for n in walk_nodes(world.trace(row, "acme").reached) if n.kind in ("run", "model version")}
    assert (mine, others) == ({"r1", "m version 1"}, {"r2", "n version 1"})
    assert not world.trace(row, "nobody").found


def test_raw_record_is_traced_to_its_derived_records_and_their_runs(world: World) -> None:
    raw = [{"text": f"My number is 555-{n:04}, call me about {n}."} for n in range(30)]
    masked = [{"instruction": f"call {n}", "answer": f"My number is [REDACTED], call me about {n}."} for n in range(30)]
    source = world.create(raw, "raw")
    shuffled = [*range(10, 30), *range(10)]
    prepared = world.derive(source, [masked[n] for n in shuffled], [raw[n] for n in shuffled], "masked")
    world.run("r1", prepared, world.split(prepared))
    found = world.trace(raw[3])
    assert [node.name for node in found.reached] == ["raw@1"]
    assert node(found, "masked@1").facts["numbers"] == [24]
    assert node(found, "masked@1").facts["how"] == ["made of it"]
    below = {node.kind for node in walk_nodes([node(found, "masked@1")])}
    assert below == {"dataset version", "split", "run"}
    # In the other direction: the masked record was in no raw version.
    assert [node.name for node in world.trace(masked[3]).reached] == ["masked@1"]


def test_index_of_many_segments_gives_the_same_trace(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, masked = rows(30), rows(30, first=100)
    shuffled = [*range(10, 30), *range(10), 3]
    source = small.create(raw, "raw")
    for name, length in (("one", 31), ("many", 4)):
        monkeypatch.setattr(record_index, "MAX_SEGMENT_RECORDS", length)
        made = small.derive(source, [masked[n] for n in shuffled], [raw[n] for n in shuffled], name, place=name)
        index = find_index(small.store, made.artifact)
        assert index is not None and len(index.records) == len(index.origins) == -(-31 // length)
    for place, number in enumerate(shuffled, start=1):
        for row, how in ((raw[number], "made of it"), (masked[number], "the same record")):
            one, many = (node(small.trace(row), f"{name}@1").facts | {"id": ""} for name in ("one", "many"))
            assert one == many
            assert one["how"] == [how]
            assert one["numbers"] == ([24, 31] if number == 3 else [place])


def test_model_started_from_another_inherits_its_training_records(world: World) -> None:
    corpus, other = rows(30), rows(30, first=100)
    version, later = world.create(corpus), world.create(other, "later")
    splits = world.split(version)
    exports = world.model("m", "r1", world.run("r1", version, splits))
    adapter = world.run("r2", later, world.split(later), base=exports["merged"])
    world.model("n", "r2", adapter)
    world.deploy("n", 1, promotion=1)
    row = next(row for row in corpus if split_of(splits, world.store, row) == "train")
    found = world.trace(row)
    assert "run r1/model version m version 1/run r2/model version n version 1/serving" in " ".join(paths(found.reached))
    assert node(found, "r2").facts["used"] == ["started from it"]
    assert found.live == ["n version 1"]


def test_comparison_with_the_last_accepted_model_is_not_use_of_its_data(world: World) -> None:
    version, later = world.create(rows(30)), world.create(rows(30, first=100), "later")
    splits = world.split(version)
    adapter = world.run("r1", version, splits)
    world.run("r2", later, world.split(later))
    world.publish("s3://hanzo-ml/runs/r2/evaluation-again", "evaluation", {"accepted": adapter})
    row = next(row for row in rows(30) if split_of(splits, world.store, row) == "train")
    assert {n.name for n in walk_nodes(world.trace(row).reached) if n.kind == "run"} == {"r1"}


@pytest.mark.parametrize("status", ["running", "failed", "cancelled"])
def test_unsuccessful_run_is_included_in_the_trace(small: World, status: str) -> None:
    version = small.create(rows(30))
    splits = small.split(version)
    small.jobs.submit(name="r1", config={}, user="u", organization="default", id="r1", status="running")
    RunData(small.database).log_batch("r1", params=[("dataset", "d"), ("dataset_version", "1")])
    folder = small.folder / "record"
    folder.mkdir()
    folder.joinpath("run.json").write_text("{}")
    inputs = {role: splits[role].digest for role in ("train", "validation")}
    small.store.publish(folder, "s3://hanzo-ml/runs/r1/record", "run", inputs=inputs)
    if status == "failed":
        small.jobs.fail("r1", "no memory")
    elif status == "cancelled":
        small.jobs.cancel("r1")
    row = next(row for row in rows(30) if split_of(splits, small.store, row) == "train")
    found = node(small.trace(row), "r1")
    assert (found.facts["status"], found.facts["used"]) == (status, ["trained on it"])


def test_deployments_are_listed_with_their_end(world: World) -> None:
    version = world.create(rows(30))
    splits = world.split(version)
    for run in ("r1", "r2"):
        world.model("m", run, world.run(run, version, splits))
    world.deploy("m", 1, promotion=1)
    world.deploy("m", 2, promotion=2)
    row = next(row for row in rows(30) if split_of(splits, world.store, row) == "train")
    found = world.trace(row)
    served = {node.facts["model"]: node.facts for node in walk_nodes(found.reached) if node.kind == "deployment"}
    assert (served["m version 1"]["status"], served["m version 2"]["status"]) == ("replaced", "serving")
    assert served["m version 1"]["until"] is not None and served["m version 2"]["until"] is None
    assert found.live == ["m version 2"]


def test_a_record_has_its_number_in_its_split(small: World) -> None:
    corpus = rows(40)
    version = small.create(corpus)
    for name, artifact in small.split(version).items():
        lines = [json.loads(line) for line in iterate_record_lines(small.store, artifact)]
        for number, row in enumerate(lines, start=1):
            assert node(small.trace(row), f"d@1 {name}").facts["numbers"] == [number]


def test_copied_split_is_looked_up_in_its_own_index(small: World) -> None:
    """Splits were copies before they became references to lines of their version."""
    corpus = rows(6)
    version = small.create(corpus)
    folder = small.folder / "copy"
    folder.mkdir()
    lines = [encode_canonical_line(row) for row in reversed(corpus[2:])]
    (folder / "train.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    inputs = {"dataset": version.artifact.digest}
    artifact = small.store.publish(folder, f"{version.storage_path}splits/old/train", "split", inputs=inputs)
    publish_index(small.store, artifact, lines)
    with small.database.write() as connection:
        record_artifact(connection, artifact, small.store.manifest(artifact))
        Datasets(small.database).set_splits(connection, version, {"train": {"artifact": artifact.model_dump()}})
    (folder / "train.jsonl").unlink()  # matches come from the index alone
    small.store.remove(f"{artifact.uri}/train.jsonl")
    assert node(small.trace(corpus[5]), "d@1 train").facts["numbers"] == [1]
    assert "d@1 train" not in str(small.trace(corpus[0]).reached)


@pytest.mark.slow
@pytest.mark.parametrize("left", ["no index", "an index of other records"])
def test_split_without_a_valid_index_is_read_instead(world: World, left: str) -> None:
    """As after a crash between split and index, or a rebuild with other parameters."""
    corpus = rows(30)
    version = world.create(corpus)
    splits = world.split(version)
    before = [world.trace(row) for row in corpus]
    for artifact in (version.artifact, *splits.values()):
        world.store.delete(index_uri(artifact.uri))
        if left != "no index":
            strange = artifact.model_copy(update={"digest": "0" * 64})
            publish_index(world.store, strange, [b'{"text": "another"}'])
    assert [world.trace(row) for row in corpus] == before


def test_a_text_is_found_in_all_versions_and_each_record_is_searched_once(world: World) -> None:
    corpus = rows(200)
    world.create(corpus)
    world.create([*corpus, *rows(50, first=1000)])
    marked = {"text": 'She said "ça va?"\nand left'}
    world.create([*corpus, marked], "other")
    matches = trace_matches(Tracer(world.database, world.store, "default"), 'said "ça va?"\nand', 10)
    assert matches.records == 1
    assert [each.preview for each in matches.traces] == [encode_canonical_line(marked).decode()]
    assert [node.name for node in matches.traces[0].reached] == ["other@1"]
    many = trace_matches(Tracer(world.database, world.store, "default"), "number 1", 5)
    assert len(many.traces) == 5
    assert [node.name for node in many.traces[0].reached] == ["d@1", "d@2", "other@1"]
    assert trace_matches(Tracer(world.database, world.store, "default"), "instruction", 5).records == 0
    assert trace_matches(Tracer(world.database, world.store, "nobody"), "number", 5).records == 0


@pytest.mark.parametrize("edited", [[0], [0, 1 << 21], [1 << 20], [1 << 22, 3 << 19]], ids=str)
def test_a_text_is_found_in_a_record_that_is_longer_than_a_chunk_wherever_it_was_edited(
    world: World, edited: list[int]
) -> None:
    """Most chunks were searched in the previous version; only the edited ones are new."""
    long = random.Random(0).randbytes(3_000_000).hex()
    others = rows(2)
    world.create([others[0], {"text": long}, others[1]])
    for place in edited:
        long = f"{long[:place]} newword {long[place:]}"
    world.create([others[0], {"text": long}, others[1]])
    assert trace_matches(Tracer(world.database, world.store, "default"), "newword", 5).records == 1


def test_record_whose_chunk_sequence_is_known_is_still_searched(world: World) -> None:
    """The third record starts like the second and ends like the first, but equals neither."""
    long = random.Random(0).randbytes(3_000_000).hex()
    world.create([{"text": f"{long} end of the first"}])
    world.create([{"text": f"begin of the second {long}"}])
    world.create([{"text": f"begin of the second {long} end of the first"}])
    search = TextSearch(world.store, "newword")
    for version in Tracer(world.database, world.store, "default").versions:
        before = search.size
        assert list(search.lines(version)) == []
        assert search.size - before > len(long)
