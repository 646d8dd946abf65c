"""The job contract: documents are immutable, strictly validated, and hash equally on every machine."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from recipes.contracts.job import (
    BadConfiguration,
    CheckpointPolicy,
    Distributed,
    Job,
    Program,
    Result,
    Schedule,
    StoreAddress,
)
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import TrainingFacts
from recipes.storage.manifest import Artifact, FileRecord, Manifest, canonical_json

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ADDRESS = StoreAddress(root="file:///objects", buckets={"datasets": "d", "checkpoints": "c", "models": "m"})
DATASET = Artifact(kind="dataset", uri="s3://hanzo-ml/datasets/d/1", digest="a" * 64, size_bytes=1)


def job(**changed: Any) -> Job:
    values: dict[str, Any] = {
        "id": "job-1",
        "program": Program.PREPARE,
        "inputs": {"dataset": DATASET},
        "parameters": {"seed": 1},
        "outputs": {"train": "s3://hanzo-ml/datasets/d/1/train"},
        "result_uri": "s3://hanzo-ml/datasets/d/1/result.json",
        "store": ADDRESS,
        "work_dir": "/work",
        "cache_dir": "/cache",
    }
    return Job.model_validate(values | changed)


def test_job_round_trips_through_json() -> None:
    assert Job.model_validate_json(job().model_dump_json()) == job()


def test_work_digest_is_independent_of_where_a_job_runs() -> None:
    elsewhere = job(
        id="job-2",
        work_dir="/other",
        cache_dir="/other/cache",
        store=StoreAddress(root="http://s3:9000", buckets=ADDRESS.buckets),
        hardware={"cpu": 64},
        checkpoint={"interval": "20m"},
        tracking={"uri": "http://tracking", "run_id": "r"},
    )
    assert elsewhere.work_digest == job().work_digest


@pytest.mark.parametrize(
    "changed",
    [
        {"program": "train"},
        {"parameters": {"seed": 2}},
        {"inputs": {"dataset": DATASET.model_copy(update={"digest": "b" * 64})}},
        {"inputs": {"data": DATASET}},
        {"outputs": {"train": "s3://hanzo-ml/datasets/d/2/train"}},
    ],
)
def test_work_digest_depends_on_the_work(changed: dict[str, Any]) -> None:
    assert job(**changed).work_digest != job().work_digest


def test_an_unknown_key_of_a_job_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="chekpoint"):
        job(chekpoint={})


def test_contract_objects_are_immutable() -> None:
    with pytest.raises(ValidationError):
        job().id = "other"  # type: ignore[misc]


names = st.text(min_size=1, max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
documents = st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4)


@given(documents)
def test_manifest_bytes_and_digest_are_canonical(facts: dict[str, Any]) -> None:
    reordered = dict(reversed(list(facts.items())))
    file = FileRecord(path="a", sha256="0" * 64, size=1)
    first, second = (Manifest(kind="k", files=(file,), facts=f) for f in (facts, reordered))
    assert first.to_bytes() == second.to_bytes()
    again = Manifest.model_validate_json(first.to_bytes())
    assert again.digest == first.digest
    assert again.to_bytes() == first.to_bytes()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_number_is_refused_in_canonical_json(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"loss": number})


def test_losses_of_a_diverged_run_round_trip() -> None:
    """Divergence gives NaN; an unreadable result would make the job count as never finished."""
    facts = TrainingFacts(
        train_seconds=1.0,
        resumed_from=None,
        unsent_metrics=0,
        losses={1: 2.5, 2: None},
        published_step=2,
        tokens=512,
        peak_memory=1 << 30,
        checkpoint_seconds=0.1,
        longest_checkpoint=0.1,
        checkpoint_share=0.1,
    )
    result = Result(work_digest="0" * 64, facts=facts.model_dump(mode="json"))
    again = Result.model_validate_json(result.model_dump_json())
    assert TrainingFacts.model_validate(again.facts) == facts


def test_a_metric_that_is_not_finite_does_not_make_a_result_unreadable() -> None:
    """NaN is refused on creation or round-trips, but is never written in unreadable form."""
    try:
        result = Result(work_digest="0" * 64, metrics={"loss": math.nan, "steps": 3.0})
    except ValidationError:
        return
    assert Result.model_validate_json(result.model_dump_json(indent=1)).metrics["steps"] == 3.0


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_named_like_its_file(path: Path) -> None:
    assert Recipe.load(path).name == path.stem


def changed_recipe(folder: Path, **changed: Any) -> Path:
    document = yaml.safe_load((RECIPES / "smollm2-135m-lora.yaml").read_text())
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (document | changed).items() if v != "REMOVED"}))
    return path


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"learning_rat": 1e-3}, "learning_rat"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
        ({"lora_rank": 0}, "lora_rank"),
        ({"max_steps": "REMOVED"}, "max_steps"),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last"),
        ({"hardware": {"gpu": 1}}, "hardware.gpu"),
        ({"base_model": {"uri": "pypi://x", "sha256": "short"}}, "base_model.sha256"),
        ({"method": "qlora2"}, "method"),
    ],
)
def test_invalid_recipe_is_refused_in_one_line_naming_file_and_key(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    path = changed_recipe(tmp_path, **changed)
    with pytest.raises(BadConfiguration) as caught:
        Recipe.load(path)
    assert f"'{named}'" in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(BadConfiguration, match=r"unknown recipe 'smolm2'.*Known recipes: .*smollm2-135m-lora"):
        Recipe.load(RECIPES / "smolm2.yaml")


def test_folder_as_recipe_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / "mine.yaml").mkdir()
    with pytest.raises(BadConfiguration, match=r"mine\.yaml is a folder: give the path of a recipe file in it"):
        Recipe.load(folder)


@pytest.mark.parametrize("text", ["a: [1,", "- just\n- a list\n", "", "\x00"])
def test_recipe_that_is_not_a_yaml_mapping_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(BadConfiguration) as caught:
        Recipe.load(tmp_path / "r.yaml")
    assert "\n" not in str(caught.value)


def test_a_recipe_in_another_encoding_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes("name: für\n".encode("latin-1"))
    with pytest.raises(BadConfiguration):
        Recipe.load(tmp_path / "r.yaml")


@pytest.mark.parametrize("interval", ["soon", "", "-1h", "1 hour"])
def test_invalid_checkpoint_interval_is_refused_on_loading_the_recipe(tmp_path: Path, interval: str) -> None:
    """Not only after the model was downloaded and loaded."""
    with pytest.raises(BadConfiguration, match="interval"):
        Recipe.load(changed_recipe(tmp_path, checkpoint={"interval": interval}))


@pytest.mark.requirement("I5", "J9", "Z15")
@pytest.mark.parametrize(
    ("policy", "schedule", "interval"),
    [
        ({}, {}, "1h"),
        ({}, {"preemptible": True}, "20m"),
        ({"interval": "5m"}, {"preemptible": True}, "5m"),
        ({"interval": "2h"}, {}, "2h"),
        ({"interval": "5m"}, {"checkpoint_interval": "30m"}, "30m"),
        ({}, {"checkpoint_interval": "3h", "preemptible": True}, "3h"),
    ],
)
def test_checkpoint_interval_follows_the_schedule(policy: dict[str, Any], schedule: dict[str, Any], interval: str) -> None:
    """Every hour, every 20 minutes on preemptible nodes, or as the job configures."""
    given = CheckpointPolicy(keep_last=2, **policy)
    assert given.for_schedule(Schedule(**schedule)) == CheckpointPolicy(keep_last=2, interval=interval)


@pytest.mark.requirement("G2", "H1", "I1", "I6", "Z32")
def test_defaults_match_the_specification() -> None:
    policy = CheckpointPolicy()
    assert (policy.interval, policy.interval_steps, policy.for_unstable_run().interval_steps) == ("1h", 1000, 500)
    assert (policy.keep_last, policy.save_on_preempt, policy.resume_from) == (3, True, "latest")
    assert CheckpointPolicy(interval_steps=50).for_unstable_run().interval_steps == 50
    shape = Distributed()
    assert (shape.strategy, shape.num_nodes, shape.gpus_per_node, shape.backend) == ("ddp", 1, 8, "nccl")
    assert (shape.gang_scheduling, shape.rdma) == (True, "auto")
    schedule = Schedule()
    assert (schedule.max_duration, schedule.checkpoint_interval, schedule.preemptible) == ("48h", None, False)
    defaults = {name: field.default for name, field in Recipe.model_fields.items()}
    assert (defaults["method"], defaults["objective"]) == ("lora", "sft")
