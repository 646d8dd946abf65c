"""Pipeline training matches one process, and resumes with another number of stages.

`test_kill_resume` covers the bit-exact resume with the same number, `test_two_processes` the start by LocalCompute.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.recipe import Recipe
from recipes.storage.artifact_store import MANIFEST_FILE
from recipes.storage.manifest import Manifest
from recipes.training.data.sample_order import SAMPLES_SEEN
from recipes.training.model import load_model
from recipes.training.parallel.pipeline import Pipeline
from recipes.training.parallel.pipeline_stage import causal_model, load_adapter
from recipes.training.parallel.process_group import ProcessGroup
from tests.recipes.training.forked_processes import Forks
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.training_workspace import Place, facts
from tests.support.recipes.deep_model import deeper

__all__ = ["deeper"]

pytestmark = pytest.mark.slow

FULL = {"method": "full", "dtype": "float32", "learning_rate": 1e-3}
MIXED = FULL | {"dtype": "bfloat16", "gradient_checkpointing": True}
ADAPTER = {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]}


@dataclass(frozen=True)
class Numbers:
    """Metrics that a run logged at each step."""

    losses: list[float]
    norms: list[float]
    validation: list[float]
    rates: list[float]


def job_of(place: Place, work: Path, stages: int | None, **settings: Any) -> Job:
    """Return a job with that many stages, or with one process if None."""
    changed = settings | ({"distributed": shape("pipeline", stages)} if stages else {})
    job = place.job(work, changed)
    return job.model_copy(update={"distributed": place.recipe.changed(changed).distributed})


def numbers(place: Place, work: Path) -> Numbers:
    checkpoint = place.checkpoints(work).latest()
    assert checkpoint
    log = json.loads((checkpoint[1] / "trainer_state.json").read_text())["log_history"]
    keys = ("loss", "grad_norm", "eval_loss", "learning_rate")
    return Numbers(*([entry[key] for entry in log if key in entry] for key in keys))


def weights(place: Place, result: Result, cache: Path) -> dict[str, torch.Tensor]:
    (trained,) = (made for role, made in result.artifacts.items() if role != "base")
    (file,) = place.store.fetch(trained, cache).glob("*.safetensors")
    return load_file(file)


def other_file_digests(place: Place, result: Result) -> dict[str, str]:
    """Return the digests of published adapter files other than weights; empty without an adapter."""
    adapter = result.artifacts.get("adapter")
    files = place.store.manifest(adapter).files if adapter else ()
    return {file.path: file.sha256 for file in files if not file.path.endswith(".safetensors")}


@pytest.mark.requirement("H4")
@pytest.mark.parametrize(
    ("stages", "times", "model", "method", "tolerance"),
    [
        (2, 4, "tied", ADAPTER, 1e-4),
        pytest.param(2, 4, "tied", FULL, 1e-4, marks=pytest.mark.long),
        pytest.param(2, 1, "tied", FULL, 1e-4, marks=pytest.mark.long),
        pytest.param(3, 4, "qwen2", FULL, 1e-4, marks=pytest.mark.long),
        (3, 2, "qwen2", ADAPTER | {"base_dtype": "bfloat16", "gradient_checkpointing": True}, 1e-3),
        (3, 4, "qwen2", MIXED, 1e-3),
    ],
)
def test_pipeline_stages_match_one_process_on_the_same_rows(
    place: Place,
    started: Forks,
    deeper: dict[str, Any],
    tmp_path: Path,
    stages: int,
    times: int,
    model: str,
    method: dict[str, Any],
    tolerance: float,
) -> None:
    settings = {"batch_size": 4 // times, "gradient_accumulation": times, "max_steps": 6, "max_grad_norm": 2.0, **method}
    settings |= deeper if model == "qwen2" else {}
    works = [tmp_path / f"{tmp_path.name}-{name}" for name in ("one", "cut")]
    one, cut = (started.train(job_of(place, work, of, **settings)) for work, of in zip(works, (None, stages), strict=True))
    expected, found = (numbers(place, work) for work in works)
    assert len(found.losses) == len(found.norms) == 6 and len(found.validation) == 3
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    assert found.validation == pytest.approx(expected.validation, rel=tolerance)
    assert found.rates == expected.rates
    whole, parts = (weights(place, result, tmp_path / "cache") for result in (one, cut))
    assert whole.keys() == parts.keys()
    assert other_file_digests(place, one) == other_file_digests(place, cut)
    off = {name: (parts[name].float() - of.float()).norm() / of.float().norm() for name, of in whole.items()}
    # A bias common to all keys does not change the attention: it only moves by rounding.
    assert all(far < 10 * tolerance for name, far in off.items() if not name.endswith("k_proj.bias")), off


@pytest.mark.parametrize("method", [pytest.param(ADAPTER, marks=pytest.mark.long), FULL], ids=["adapter", "full"])
def test_killed_run_resumes_with_fewer_and_more_stages(
    place: Place, started: Forks, deeper: dict[str, Any], tmp_path: Path, method: dict[str, Any]
) -> None:
    """Equal up to the rounding of reordered sums: each step has the same rows."""
    chance = random.Random(7)
    settings: dict[str, Any] = {"batch_size": 1, "gradient_accumulation": 4, "max_steps": 14, "eval_steps": 7}
    settings |= {**method, **deeper}
    works = [tmp_path / f"{tmp_path.name}-{name}" for name in ("whole", "changing")]
    whole = started.train(job_of(place, works[0], 2, **settings))
    job = job_of(place, works[1], 2, **settings)
    for stages, until in ((2, 3), (1, 6), (3, 9)):
        there = place.recipe.changed({"distributed": shape("pipeline", stages)}).distributed
        started.kill(job.model_copy(update={"distributed": there}), until, chance)
    result = started.train(job)
    assert (facts(result).resumed_from or 0) >= 8
    losses = facts(result).losses
    assert losses == pytest.approx(facts(whole).losses, rel=1e-4) and list(losses) == list(range(1, 15))
    checkpoint = place.checkpoints(works[1]).latest()
    assert checkpoint
    assert Manifest.model_validate_json((checkpoint[1] / MANIFEST_FILE).read_bytes()).facts[SAMPLES_SEEN] == 14 * 4
    ended, undisturbed = (weights(place, of, tmp_path / "cache") for of in (result, whole))
    assert all((ended[name] - of).norm() < 1e-3 * of.norm() for name, of in undisturbed.items())


def test_an_adapter_of_another_size_is_refused(place: Place, tmp_path: Path) -> None:
    adapted = [load_model(place.folder / "model", place.recipe.changed({"lora_rank": rank})) for rank in (4, 8)]
    adapted[0].save_pretrained(tmp_path)
    load_adapter(adapted[0], tmp_path)
    with pytest.raises(BadConfiguration, match=r"does not fit the recipe: base_model\.model\..* has another shape"):
        load_adapter(adapted[1], tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(BadConfiguration, match="does not fit the recipe"):
        load_adapter(adapted[0], tmp_path)


@pytest.fixture
def one_process() -> Iterator[ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["forwards", "back"])
def test_out_of_memory_in_a_stage_keeps_its_error_type(place: Place, one_process: ProcessGroup, way: str) -> None:
    """The pipeline schedule raises its own error for any error of a layer.

    The run would then not be retried with smaller batches.
    """
    recipe = place.recipe.changed({"distributed": shape("pipeline", 1)})
    model = load_model(place.folder / "model", recipe)

    def run_out(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    layer = causal_model(model).model.layers[1]
    layer.register_forward_pre_hook(run_out) if way == "forwards" else layer.register_full_backward_pre_hook(run_out)
    pipeline = Pipeline(model, recipe, one_process, torch.device("cpu"), autocast=None, scale=1.0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        pipeline.step(rows_of_step(recipe))


def test_a_weight_is_copied_to_16_bits_once_in_a_step(place: Place, one_process: ProcessGroup) -> None:
    """Not once per micro-batch: several are in flight in a stage at the same time."""
    recipe = place.recipe.changed(FULL | {"gradient_accumulation": 3, "distributed": shape("pipeline", 1)})
    model = load_model(place.folder / "model", recipe.changed({"distributed": None}))
    model.config.tie_word_embeddings = False  # no other stage holds the tied weight
    pipeline = Pipeline(model, recipe, one_process, torch.device("cpu"), autocast=torch.bfloat16, scale=1.0)
    widest = model.model.layers[0].mlp.up_proj.weight
    with Copies(widest.shape) as copies:
        pipeline.step(rows_of_step(recipe))
    layers = len(model.model.layers)
    assert copies.to_16_bits == 2 * layers, "one of each gate and each up projection"
    assert widest.grad is not None


class Copies(TorchDispatchMode):
    """Counts conversions to bfloat16 of tensors of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.to_16_bits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.shape == self.shape and found.dtype is torch.bfloat16:
            self.to_16_bits += 1
        return found


def rows_of_step(recipe: Recipe) -> dict[str, torch.Tensor]:
    rows = torch.ones(recipe.samples_per_step, recipe.sequence_length, dtype=torch.int64)
    return {"input_ids": rows, "labels": rows, "position_ids": rows.cumsum(1) - 1}
