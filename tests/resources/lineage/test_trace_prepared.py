"""A raw record is found in what the program prepare made of it: masked, tokenized, shuffled, split, and prepared again."""

from pathlib import Path

import pytest

from recipes.parameters import PrepareParameters
from recipes.prepare import prepare
from recipes.schema import Hardware, Job, Program, Result
from recipes.split import SPLITS
from resources.derived_versions import Derivation, add_prepared
from resources.lineage.trace_tree import nodes_below
from resources.lineage.training_data import Included
from resources.metadata.datasets import DatasetVersion
from tests.recipes.preparation.place import questions
from tests.recipes.tiny_model import make_tokenizer
from tests.resources.lineage.test_trace import World, node, small
from tests.resources.lineage.test_training_data import asked

__all__ = ["small"]

PARAMETERS = {"filter": {"dedup": True}, "augment": {"mask_pii": True, "oversample_minority": True}}


def prepared(world: World, version: DatasetVersion, name: str, **parameters: object) -> tuple[DatasetVersion, Result]:
    place = f"s3://hanzo-ml/datasets/{name}/prepared/x"
    wanted = PrepareParameters.model_validate(PARAMETERS | parameters)
    job = Job(
        id=f"prepare-{name}",
        program=Program.PREPARE,
        inputs={"dataset": version.artifact},
        parameters=wanted.model_dump(mode="json"),
        outputs={role: f"{place}/{role}" for role in (*SPLITS, "rejected")} | {"dataset": f"{place}/all/records"},
        result_uri=f"{place}/result.json",
        store=world.store.address,
        work_dir=str(world.folder / "work" / name),
        cache_dir=str(world.folder / "cache"),
        hardware=Hardware(cpu=2),
    )
    result = prepare(job, world.store, Path(job.work_dir))
    made, is_new = add_prepared(world.database, world.store, Derivation(version, name, wanted, "u"), result)
    assert is_new
    return made, result


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
    version, result = prepared(small, source, "ready", tokenize={"tokenizer": tokenizer, "max_length": 4096})
    again, _ = prepared(small, version, "again", augment={"mask_pii": False, "shuffle_seed": 1})
    adapter = small.run("r1", version, {split: result.artifacts[split] for split in SPLITS})
    small.model("m", "r1", adapter)
    for number in (0, 7, 33):
        found = small.trace(raw[number])
        (root,) = found.reached
        assert root.name == "raw@1"
        for reference in (version.reference, again.reference):
            assert node(found, reference).facts["how"] == ["made of it"]
        splits = [node for node in nodes_below(found.reached) if node.kind == "split"]
        assert len(splits) == 2, "one of each version that was prepared"
        (run,) = (node for node in nodes_below(found.reached) if node.kind == "run" and not node.seen_above)
        assert run.name == "r1"
        assert node(found, "m version 1").facts["learned"] == (run.facts["used"] == ["trained on it"])
    copies = [small.trace(row) for row in raw if row["class"] == "rare"]
    trained = [found for found in copies if any(node.name == "ready@1 train" for node in nodes_below(found.reached))]
    assert trained and all(int(str(node(found, "ready@1 train").facts["records"])) > 1 for found in trained)
    data = asked(small)
    assert data.personal_data is Included.MASKED
    assert {use.dataset for use in data.datasets} == {"raw@1", "ready@1"}
    assert data.datasets[0].personal_data.masked == {"email": 61}
