"""Leaks: every test record that equals or resembles a training record is reported, no other."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.job import Job, Program, Result, StoreAddress
from recipes.contracts.parameters import NearDuplicates
from recipes.contracts.validation_results import Leak, Leaks
from recipes.find_leaks import find_leaks
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.manifest import Artifact
from recipes.validation import leakage
from recipes.validation.leakage import HeldOutIndex
from recipes.validation.record_blocks import iterate_lines
from tests.recipes.limited_memory import run_within

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
WORDS = [f"word{number}" for number in range(400)]


def text(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leaks(folder: Path, test: list[dict[str, Any]], train: list[dict[str, Any]], threshold: float = 0.8) -> list[Leak]:
    with HeldOutIndex([file(folder / "test.jsonl", test)], NearDuplicates(threshold=threshold)) as tested:
        return list(tested.leaks(iterate_lines([file(folder / "train.jsonl", train)]), "d@1 train"))


def test_equal_question_leaks_regardless_of_case_and_answer(tmp_path: Path) -> None:
    test = [{"instruction": "Who keeps the lamp?", "answer": "She."}, {"instruction": "Who built it?", "answer": "He."}]
    train = [{"instruction": "Where?", "answer": "There."}, {"instruction": "who KEEPS the lamp", "answer": "Nobody."}]
    (leak,) = leaks(tmp_path, test, train)
    assert (leak.line, leak.match, leak.ancestor, leak.ancestor_line) == (1, "exact", "d@1 train", 2)
    assert leak.text == "Who keeps the lamp?\nShe."


def test_texts_leak_from_the_similarity_threshold_on(tmp_path: Path) -> None:
    test = [{"text": text(seed)} for seed in range(100)]
    changed = [{"text": text(seed).replace("word1 ", "other ")} for seed in range(40)]
    unrelated = [{"text": text(1000 + seed)} for seed in range(500)]
    found = leaks(tmp_path, test, unrelated + changed, threshold=0.7)
    assert {leak.line for leak in found} == set(range(1, 41))
    assert all(leak.ancestor_line == 500 + leak.line for leak in found)
    assert all(leak.similarity >= 0.7 for leak in found)


def test_exact_match_takes_precedence_over_near_match(tmp_path: Path) -> None:
    near, same = {"text": f"{text(1)} more"}, {"text": text(1)}
    (leak,) = leaks(tmp_path, [same], [near, same])
    assert (leak.match, leak.ancestor_line) == ("exact", 2)


def test_empty_splits_have_no_leaks(tmp_path: Path) -> None:
    assert leaks(tmp_path, [], [{"text": "a"}]) == []
    assert leaks(tmp_path, [{"text": "a"}], []) == []


def test_the_program_counts_each_test_record_once_and_keeps_all_leaks(tmp_path: Path) -> None:
    address = StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS)
    store = Store(address)

    def published(name: str, rows: list[dict[str, Any]]) -> Artifact:
        return store.publish(file(tmp_path / name / "records.jsonl", rows).parent, f"s3://hanzo-ml/datasets/{name}", "split")

    rows = [{"text": text(seed)} for seed in range(30)]
    job = Job(
        id="leaks",
        program=Program.FIND_LEAKS,
        inputs={
            "test": published("test", rows),
            "ancestor-0": published("a", rows[:25]),
            "ancestor-1": published("b", rows[20:]),
        },
        parameters={"names": {"ancestor-0": "a@1 train", "ancestor-1": "b@1 train"}},
        outputs={"leaks": "s3://hanzo-ml/datasets/leaks"},
        result_uri="s3://hanzo-ml/datasets/result.json",
        store=address,
        work_dir=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
    )
    result = find_leaks(job, store, tmp_path)
    found = Leaks.model_validate(result.facts)
    assert (found.tested, found.searched, found.exact, found.near) == (30, 2, 30, 0)
    assert found.by_ancestor == {"a@1 train": 25, "b@1 train": 10}
    folder = store.fetch(result.artifacts["leaks"], tmp_path / "cache")
    assert len((folder / "leaks.jsonl").read_text().splitlines()) == 35
    assert not (tmp_path / "cache" / job.inputs["ancestor-0"].digest).exists(), "what was trained on is read where it lies"
    other = store.local_path(f"{job.inputs['ancestor-1'].uri}/records.jsonl")
    assert other is not None
    other.write_text(other.read_text().replace("word1 ", "word2 "))
    with pytest.raises(BrokenArtifact, match=r"datasets/b/records\.jsonl has SHA-256"):
        find_leaks(job, store, tmp_path)


def test_hash_collision_is_not_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints only select candidates."""
    monkeypatch.setattr(leakage, "hash_record", len)
    test = [{"instruction": "Who keeps the lamp?", "answer": "She."}]
    train = [
        {"instruction": "Who built the lamp?", "answer": "She."},
        {"instruction": "Who keeps the lamp", "answer": "He."},
    ]
    (leak,) = leaks(tmp_path, test, train, threshold=1.0)
    assert (leak.match, leak.ancestor_line) == ("exact", 2)


MEGABYTES = 150
LIMIT = 300 << 20
"""Data memory limit: Python with its libraries takes about 200 MB of it."""


@pytest.mark.slow
def test_test_split_larger_than_memory_is_checked(tmp_path: Path) -> None:
    draw = random.Random(1)
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    raw = tmp_path / "raw" / "records.jsonl"
    raw.parent.mkdir()
    with raw.open("w") as out:
        for number in range(MEGABYTES * 16):
            out.write(json.dumps({"text": f"{number} {draw.randbytes(32_000).hex()}"}) + "\n")
    records = store.publish(raw.parent, "s3://hanzo-ml/datasets/d", "split")
    job = Job(
        id="leaks",
        program=Program.FIND_LEAKS,
        inputs={"test": records, "ancestor": records},
        outputs={"leaks": "s3://hanzo-ml/datasets/leaks"},
        result_uri="s3://hanzo-ml/datasets/result.json",
        store=store.address,
        work_dir=str(tmp_path / "work"),
        cache_dir=str(tmp_path / "cache"),
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    done = run_within(LIMIT, "recipes.find_leaks", tmp_path / "job.json")
    assert done.returncode == 0, done.stderr[-2000:]
    found = Result.model_validate_json(store.get_bytes(job.result_uri)).facts
    assert (found["tested"], found["exact"]) == (MEGABYTES * 16, MEGABYTES * 16)
