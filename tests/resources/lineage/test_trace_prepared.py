"""Tracing raw records through preparation: masked, tokenized, shuffled, split and prepared again."""

import json
from pathlib import Path

import pytest

from recipes.preparation.split_assignment import SPLITS
from resources.lineage.trace import walk_nodes
from resources.lineage.training_data import Included
from tests.recipes.preparation.preparation_workspace import questions
from tests.recipes.tiny_model import make_tokenizer
from tests.support.resources.lineage import World, node, small
from tests.support.resources.prepared_lineage import prepared
from tests.support.resources.training_data import asked

__all__ = ["small"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return (tmp_path / "tokenizer").as_uri()


@pytest.mark.slow
def test_a_raw_record_reaches_the_model_that_learned_its_tokens(small: World, tokenizer: str) -> None:
    raw = questions(60)
    for number, row in enumerate(raw):
        row["class"] = "rare" if number % 10 == 0 else "often"
        row["answer"] += f" Write to keeper{number}@example.com."
    source = small.create([*raw, {**raw[7], "id": 7}], "raw")
    version, result = prepared(small, source, "ready", tokenize={"tokenizer": tokenizer, "max_length": 128})
    again, _ = prepared(small, version, "again", augment={"mask_pii": False, "shuffle_seed": 1})
    adapter = small.run("r1", version, {split: result.artifacts[split] for split in SPLITS})
    small.model("m", "r1", adapter)
    for number in (0, 7, 33):
        found = small.trace(raw[number])
        (root,) = found.reached
        assert root.name == "raw@1"
        for reference in (version.reference, again.reference):
            assert node(found, reference).facts["how"] == ["made of it"]
        splits = [node for node in walk_nodes(found.reached) if node.kind == "split"]
        assert len(splits) == 2, "one of each version that was prepared"
        (run,) = (node for node in walk_nodes(found.reached) if node.kind == "run" and not node.seen_above)
        assert run.name == "r1"
        assert node(found, "m version 1").facts["learned"] == (run.facts["used"] == ["trained on it"])
    copies = [small.trace(row) for row in raw if row["class"] == "rare"]
    trained = [found for found in copies if any(node.name == "ready@1 train" for node in walk_nodes(found.reached))]
    assert trained and all(int(str(node(found, "ready@1 train").facts["records"])) > 1 for found in trained)
    data = asked(small)
    assert data.personal_data is Included.MASKED
    assert {use.dataset for use in data.datasets} == {"raw@1", "ready@1"}
    assert data.datasets[0].personal_data.masked == {"email": 61}


def test_kept_records_are_traced_although_masked_and_rejected_ones_are_not(small: World) -> None:
    raw = questions(40)
    for number, row in enumerate(raw):
        row["class"] = "rare" if number < 4 else "often"
        row["answer"] += f" Write to keeper{number}@example.com."
    masked_alike = {**raw[9], "answer": raw[9]["answer"].replace("keeper9@", "somebody.else@")}
    near = {**raw[10], "answer": raw[10]["answer"].replace("Write to", "Do write to")}
    rude = {"instruction": "Who is at the harbour?", "answer": "A damned fool, mail fool@example.com."}
    rejected = [masked_alike, near, rude]
    source = small.create([*raw, *rejected], "raw")
    wanted = {"dedup": True, "near_dedup": {"threshold": 0.5}, "toxicity": {"words": ["damned"]}}
    version, result = prepared(small, source, "ready", filter=wanted)
    lost = small.store.fetch(result.artifacts["rejected"], small.folder / "cache") / "rejected.jsonl"
    gone = {json.loads(line)["line"] for line in lost.read_text().splitlines()}
    assert gone == {41, 42, 43}
    copies = 0
    for row in raw:
        found = small.trace(row)
        assert node(found, version.reference).facts["how"] == ["made of it"]
        copies += int(str(node(found, version.reference).facts["records"]))
        (split,) = (node for node in walk_nodes(found.reached) if node.kind == "split")
        assert split.name.startswith(version.reference)
    assert copies == version.num_records > len(raw), "each record is of one source, oversampled ones too"
    for row in rejected:
        assert [node.name for node in walk_nodes(small.trace(row).reached)] == ["raw@1"]
