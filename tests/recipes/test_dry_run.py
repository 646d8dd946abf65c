"""Dry runs of every recipe at full size, without weights."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, Distributed, Job, Program, StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import build_torchrun_command, sharding_arguments
from recipes.storage.manifest import Artifact
from tests.resources.compute.kubernetes.jobs import launched

ROOT = Path(__file__).resolve().parents[2]
NAMES = Recipe.names()
LAYERS = {"135m": 30, "7b": 28, "72b": 80}


def dry_run(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.dry_run", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tried() -> dict[str, dict[str, Any]]:
    """Run all recipes in one process, because loading torch takes longest."""
    done = dry_run(*NAMES)
    assert done.returncode == 0, done.stderr
    return {found["recipe"]: found for found in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_built_model_matches_estimates(tried: dict[str, dict[str, Any]], name: str) -> None:
    found = tried[name]
    assert found["parameters"] == found["parameters_expected"]
    assert found["trainable"] == found["trainable_expected"]
    recipe = Recipe.named(name)
    assert found["adapted_modules"] == len(recipe.lora_target_modules) * LAYERS[name.split("-")[1]]
    if recipe.gradient_checkpointing:
        assert found["kept"] == pytest.approx(found["kept_expected"], rel=0.01)


@pytest.mark.requirement("G7")
@pytest.mark.slow
def test_dry_run_command_matches_the_process_layout(tried: dict[str, dict[str, Any]]) -> None:
    assert tried["zen-7b-lora"]["command"][0] == "python"
    assert tried["zen-72b-full"]["command"][:3] == ["torchrun", "--nnodes=4", "--nproc-per-node=8"]


@pytest.mark.requirement("H5")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("zen-72b-lora", 4), ("zen-7b-full", 8), ("zen-72b-full", 32)])
def test_fsdp_shards_over_all_processes(tried: dict[str, dict[str, Any]], name: str, processes: int) -> None:
    shards = {"fsdp_size": processes, "fsdp_mixed_precision": name.endswith("full")}
    assert tried[name]["sharding"] == {"distributed_config": shards}


@pytest.mark.slow
def test_unknown_target_module_is_refused_in_one_line(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "recipes" / "zen-7b-lora.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document | {"lora_target_modules": ["c_attn"]}))
    done = dry_run(str(tmp_path / "mine.yaml"))
    assert done.returncode == EXIT_BAD_CONFIGURATION
    assert done.stderr.splitlines()[-1].startswith("error: lora_target_modules: there is no 'c_attn'")


def test_torchrun_flags_match_those_of_a_pod() -> None:
    recipe = Recipe.named("zen-72b-full")
    job = Job(
        id="0" * 32,
        program=Program.TRAIN,
        inputs={"run": Artifact(kind="run", uri="s3://x/y", digest="0" * 64, size_bytes=1)},
        result_uri="s3://x/result",
        store=StoreAddress(root="http://s3", buckets={}),
        work_dir="/w",
        cache_dir="/c",
        hardware=recipe.hardware,
        distributed=recipe.distributed,
    )
    flags = [flag for flag in build_torchrun_command(recipe) if flag.startswith("--n")]
    assert set(flags) <= set(launched(job))


@pytest.mark.parametrize(("strategy", "stage"), [("deepspeed_zero2", 2), ("deepspeed_zero3", 3)])
def test_deepspeed_config_has_stage_precision_and_batch(strategy: Any, stage: int) -> None:
    shape = Distributed(strategy=strategy, num_nodes=1, gpus_per_node=8)
    recipe = Recipe.named("zen-7b-full").changed({"distributed": shape.model_dump()})
    found = sharding_arguments(recipe)["deepspeed"]
    assert found["zero_optimization"]["stage"] == stage
    assert found["bf16"] == {"enabled": True}
    assert found["data_types"] == {"grad_accum_dtype": "fp32"} and found["communication_data_type"] == "fp32"
    adapter = Recipe.named("smollm2-135m-lora").changed({"distributed": shape.model_dump()})
    # With a bfloat16 base the adapter is trained in float32.
    assert not {"bf16", "data_types", "communication_data_type"} & sharding_arguments(adapter)["deepspeed"].keys()
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (4, 4)
