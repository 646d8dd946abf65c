"""Splitting: deterministic, complete, without leaks, stratified; too little data is refused."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.contracts.job import BadConfiguration, Job, Program, Result, StoreAddress
from recipes.contracts.parameters import SplitParameters
from recipes.preparation.split_assignment import SPLITS
from recipes.records.record_reader import normalize_text, read_records
from recipes.split import split_dataset
from recipes.storage.artifact_store import Store
from tests.recipes.json_lines import write_json_lines
from tests.recipes.limited_memory import run_within
from tests.recipes.split_rows import divided

WORDS = ["the", "name", "of", "a", "harbour", "is", "what", "Ellarin", "keeps"]
instructions = st.lists(st.sampled_from([*WORDS, *(word.upper() for word in WORDS)]), min_size=1, max_size=4).map(" ".join)
rows_of_data = st.lists(
    st.builds(
        lambda text, mark, answer: {"instruction": text + mark, "answer": answer},
        instructions,
        st.sampled_from(["", "?", " !", "..."]),
        st.sampled_from(["yes", "no"]),
    ),
    max_size=40,
)


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"instruction": f"Question {n}?", "answer": f"Answer {n}.", **more} for n in range(count)]


def split(rows: list[dict[str, Any]], parameters: SplitParameters) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each split, in order."""
    places, _ = divided(rows, parameters)
    return {
        name: [row for row, found in zip(rows, places, strict=True) if found == place] for place, name in enumerate(SPLITS)
    }


def frozen(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.requirement("B16")
@given(rows_of_data, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_record_is_in_one_split_and_questions_are_disjoint(rows: list[dict[str, Any]], seed: int) -> None:
    parameters = SplitParameters(seed=seed, validation=0.2, test=0.2)
    try:
        splits = split(rows, parameters)
    except BadConfiguration:
        assert len({normalize_text(row["instruction"]) for row in rows}) < 5
        return
    assert frozen([row for name in SPLITS for row in splits[name]]) == frozen(rows)
    questions = [{normalize_text(row["instruction"]) for row in splits[name]} for name in SPLITS]
    assert all(questions)
    assert sum(map(len, questions)) == len(set.union(*questions))
    assert divided(rows, parameters)[1] == 0


def test_questions_are_equal_regardless_of_case_and_punctuation() -> None:
    rows = numbered(40) + [{"instruction": f"  question, {n}!", "answer": "again"} for n in range(40)]
    splits = split(rows, SplitParameters())
    for name in SPLITS:
        count = Counter(normalize_text(row["instruction"]) for row in splits[name])
        assert set(count.values()) == {2}


def test_leaks_of_column_splits_are_counted() -> None:
    rows = [{**row, "part": "train"} for row in numbered(3)]
    held_out = ("QUESTION 1", "val"), ("Another?", "validation"), ("question 2!!", "test"), ("Question 2", "test")
    rows += [{"instruction": asked, "answer": "x", "part": part} for asked, part in held_out]
    places, leaked = divided(rows, SplitParameters(column="part"))
    assert leaked == 3
    assert [SPLITS[place] for place in places] == ["train"] * 3 + ["validation"] * 2 + ["test"] * 2


def test_splits_are_deterministic_per_seed() -> None:
    rows = numbered(60)
    assert split(rows, SplitParameters(seed=1)) == split(list(rows), SplitParameters(seed=1))
    assert split(rows, SplitParameters(seed=1)) != split(rows, SplitParameters(seed=2))


def test_split_sizes_match_requested_shares() -> None:
    splits = split(numbered(200), SplitParameters(validation=0.05, test=0.2))
    assert {name: len(splits[name]) for name in SPLITS} == {"train": 150, "validation": 10, "test": 40}


@pytest.mark.parametrize("group_by", [None, "fact"])
def test_records_trained_on_by_an_older_version_never_become_test(group_by: str | None) -> None:
    """Draw order is stable: as a dataset grows, test gains records only from validation."""
    rows = [{"instruction": f"Question {n}?", "answer": "x", "fact": f"fact {n % 7}"} for n in range(800)]
    parameters = SplitParameters(group_by=group_by)
    trained: set[str] = set()
    for count in (400, 404, 440, 600, 800):
        splits = split(rows[:count], parameters)
        assert not trained & {row["instruction"] for row in splits["test"]}
        trained |= {row["instruction"] for row in splits["train"]}


def test_groups_are_spread_over_the_splits() -> None:
    rows = [{"instruction": f"Question {n}?", "answer": "x", "fact": f"fact {n % 4}"} for n in range(80)]
    splits = split(rows, SplitParameters(validation=0.1, test=0.1, group_by="fact"))
    for name, each in (("test", 2), ("validation", 2), ("train", 16)):
        assert Counter(row["fact"] for row in splits[name]) == {f"fact {n}": each for n in range(4)}


def test_a_group_with_two_questions_keeps_one_for_training() -> None:
    rows = [{"instruction": f"Question {n}?", "answer": "x", "fact": f"fact {n // 2}"} for n in range(40)]
    splits = split(rows, SplitParameters(validation=0.25, test=0.25, group_by="fact"))
    assert len({row["fact"] for row in splits["train"]}) == 20


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_records_are_refused_with_their_count(count: int) -> None:
    with pytest.raises(BadConfiguration, match=rf"^{count} distinct records? cannot fill three splits: \w+ would be empty"):
        split(numbered(count), SplitParameters(validation=0.1, test=0.1))


def test_group_by_column_without_values_is_refused() -> None:
    with pytest.raises(BadConfiguration, match=r"no record has a value in the column 'clas': correct split\.group_by"):
        split(numbered(50, **{"class": "a"}), SplitParameters(group_by="clas"))
    with pytest.raises(BadConfiguration, match="no record has a value in the column 'class'"):
        split(numbered(50, **{"class": None}), SplitParameters(group_by="class"))


def test_records_without_a_group_are_stratified_as_one_group() -> None:
    """Groups are stratified, not kept together: records without one have no preferred split."""
    rows = [{**row, "class": "a" if number % 2 else None} for number, row in enumerate(numbered(80))]
    splits = split(rows, SplitParameters(validation=0.25, test=0.25, group_by="class"))
    for name, each in (("train", 20), ("validation", 10), ("test", 10)):
        assert Counter(row["class"] for row in splits[name]) == {"a": each, None: each}


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_shares_leaving_no_training_records_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="together must be less than 1"):
        SplitParameters(validation=share, test=0.5)


@pytest.mark.parametrize("key", ["input", "system"])
def test_records_with_same_instruction_differ_by_input_or_system(key: str) -> None:
    rows = [{"instruction": "Translate.", key: f"word {n}", "answer": "x"} for n in range(12)]
    splits = split(rows, SplitParameters())
    assert {name: len(found) for name, found in splits.items()} == {"train": 10, "validation": 1, "test": 1}


def test_equal_questions_count_as_one_record() -> None:
    rows = [{"instruction": "Always the same?", "answer": f"Answer {n}."} for n in range(100)]
    with pytest.raises(BadConfiguration, match=r"^1 distinct record cannot fill three splits"):
        split(rows, SplitParameters())


class Place:
    """A store with one dataset in it, in a folder of its own."""

    def __init__(self, folder: Path, rows: Iterable[dict[str, Any]]) -> None:
        buckets = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
        self.folder = folder
        self.store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=buckets))
        raw = folder / "raw"
        raw.mkdir(parents=True)
        write_json_lines(raw / "records.jsonl", rows)
        self.dataset = self.store.publish(raw, "s3://hanzo-ml/datasets/d/1/records", "dataset")

    def job(self, seed: int = 42) -> Job:
        return Job(
            id="split",
            program=Program.SPLIT,
            inputs={"dataset": self.dataset},
            parameters=SplitParameters(seed=seed).model_dump(mode="json"),
            outputs={name: f"s3://hanzo-ml/datasets/d/1/splits/{name}" for name in SPLITS},
            result_uri="s3://hanzo-ml/datasets/d/1/splits/result.json",
            store=self.store.address,
            work_dir=str(self.folder / "work"),
            cache_dir=str(self.folder / "cache"),
        )

    def run(self) -> Result:
        return split_dataset(self.job(), self.store, self.folder / "work")


def test_artifacts_are_bit_identical_in_different_folders(tmp_path: Path) -> None:
    first, second = (Place(tmp_path / name, numbered(50)).run() for name in ("here", "there"))
    assert {role: artifact.digest for role, artifact in first.artifacts.items()} == {
        role: artifact.digest for role, artifact in second.artifacts.items()
    }
    assert first == second


def test_published_splits_reference_their_dataset_and_match_their_counts(tmp_path: Path) -> None:
    place = Place(tmp_path, numbered(50))
    result = place.run()
    for name in SPLITS:
        manifest = place.store.manifest(result.artifacts[name])
        records = read_records(place.store.fetch(result.artifacts[name], tmp_path / "cache"))
        assert manifest.inputs == {"dataset": place.dataset.digest}
        assert len(records) == result.metrics[name] == manifest.facts["num_records"]
    assert sum(result.metrics.values()) == 50
    assert result.facts["leaked"] == 0


def test_split_records_match_recorded_assignment_in_dataset_order(tmp_path: Path) -> None:
    """Dataset order. Regression: splits stored as copies were in draw order."""
    place = Place(tmp_path, numbered(50))
    result = place.run()
    found = {
        name: [int(record.answer[7:-1]) for record in read_records(place.store.fetch(artifact, tmp_path / "cache"))]
        for name, artifact in result.artifacts.items()
    }
    assert (found["validation"], found["test"]) == ([8, 36, 44, 47, 49], [10, 13, 25, 28, 40])
    held_out = {*found["validation"], *found["test"]}
    assert found["train"] == [number for number in range(50) if number not in held_out]


def test_split_has_one_file_per_dataset_file_with_records_in_it(tmp_path: Path) -> None:
    place = Place(tmp_path, numbered(3, part="train"))
    write_json_lines(tmp_path / "raw" / "second.jsonl", numbered(4, part="test"))
    held_out = [*numbered(1, part="val"), *numbered(1, part="train")]
    text = "\n\n".join(json.dumps(row) for row in held_out)  # no final newline, and an empty line
    (tmp_path / "raw" / "third.jsonl").write_text(text)
    place.dataset = place.store.publish(tmp_path / "raw", "s3://hanzo-ml/datasets/d/2/records", "dataset")
    job = place.job().model_copy(update={"parameters": {"column": "part"}})
    result = split_dataset(job, place.store, tmp_path / "work")
    files = {name: place.store.manifest(artifact).files for name, artifact in result.artifacts.items()}
    assert {name: [file.path for file in found] for name, found in files.items()} == {
        "train": ["train-00000.jsonl", "train-00002.jsonl"],
        "validation": ["validation-00002.jsonl"],
        "test": ["test-00001.jsonl"],
    }
    assert [(one.selection.before, one.selection.records) for one in files["train"] if one.selection] == [(0, 3), (7, 2)]
    for name, count in {"train": 4, "validation": 1, "test": 4}.items():
        records = read_records(place.store.fetch(result.artifacts[name], tmp_path / "cache"))
        assert len(records) == count == result.metrics[name]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_text_with_unicode_line_separator_stays_one_record(tmp_path: Path, separator: str) -> None:
    """Only `\\n` ends a JSON line; text from the web holds the others."""
    rows = [{"instruction": f"Line{separator}break {n}?", "answer": f"One{separator}answer."} for n in range(30)]
    place = Place(tmp_path, rows)
    result = place.run()
    records = [r for a in result.artifacts.values() for r in read_records(place.store.fetch(a, tmp_path / "cache"))]
    assert len(records) == 30
    assert {record.answer for record in records} == {f"One{separator}answer."}


MEGABYTES = 150
LIMIT = 240 << 20
"""Data memory limit: Python with its libraries takes about 100 MB of it."""


@pytest.mark.slow
def test_a_dataset_larger_than_memory_is_split(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng(1)
        for number in range(MEGABYTES * 16):
            yield {"text": f"{number} " + bytes(draw.integers(97, 123, 65_000, dtype=np.uint8)).decode()}

    place = Place(tmp_path, rows())
    job = place.job()
    (tmp_path / "work").mkdir()
    (tmp_path / "job.json").write_text(job.model_dump_json())
    done = run_within(LIMIT, "recipes.split", tmp_path / "job.json")
    assert done.returncode == 0, done.stderr
    result = Result.model_validate_json(place.store.get_bytes(job.result_uri))
    assert sum(result.metrics.values()) == MEGABYTES * 16
