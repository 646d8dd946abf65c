"""A sharded run publishes what one process would, without holding the model in memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from recipes.checkpoints.node_parts import shard_rows
from recipes.contracts.recipe import Recipe
from recipes.training.checkpointing.sharded_safetensors import ShardedTensors, consolidate_weights
from recipes.training.publishing import load_whole_model, save_sharded_weights, save_whole_weights
from tests.recipes.tiny_model import make_tiny_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[3]
LIMITED = """
import resource, sys
from pathlib import Path
from recipes.contracts.recipe import Recipe
from recipes.training.publishing import save_sharded_weights

recipe = Recipe.model_validate_json(Path(sys.argv[1]).read_text())
_, checkpoint, base, folder = map(Path, sys.argv[1:])
now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
mapped = sum(file.stat().st_size for place in (checkpoint, base) for file in place.glob("*.safetensors"))
limit = now + mapped + (100 << 20)  # what is mapped counts as data, and takes no memory that others need
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
save_sharded_weights((1, checkpoint), base, recipe, folder)
"""


def full(dtype: str) -> Recipe:
    changed: dict[str, Any] = {"method": "full", "dtype": dtype}
    changed["distributed"] = {"strategy": "fsdp", "gpus_per_node": 2, "backend": "gloo"}
    return Recipe.named("smollm2-135m-lora").changed(changed)


def spread(model: torch.nn.Module, folder: Path, processes: int = 2) -> Path:
    """Write the weights as a checkpoint stores them."""
    folder.mkdir()
    for rank in range(processes):
        own = {name: (weight, shard_rows(len(weight), rank, processes)) for name, weight in model.named_parameters()}
        parts = {name: weight.detach()[rows.start : rows.stop].clone() for name, (weight, rows) in own.items()}
        save_file(parts, folder / f"model-rows-{rank + 1:05}-of-{processes:05}.safetensors")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def trained(base: Path) -> Any:
    """Return a model with float32 weights that bfloat16 rounds."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=generator) / 100
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_sharded_weights_equal_those_of_one_process(base: Path, trained: Any, tmp_path: Path, dtype: str) -> None:
    checkpoint = (4, spread(trained, tmp_path / "checkpoint"))
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "model-00009-of-00009.safetensors").write_text("of a process that was killed")
    save_sharded_weights(checkpoint, base, full(dtype), tmp_path / "spread")
    save_whole_weights(load_whole_model(base, full(dtype), checkpoint), base, full(dtype), tmp_path / "whole")
    written = contents(tmp_path / "spread")
    assert written == contents(tmp_path / "whole")
    assert json.loads(written["config.json"])["dtype"] == dtype


def test_published_config_keeps_use_cache_of_the_base_model(base: Path, tmp_path: Path) -> None:
    model = load_whole_model(base, full("bfloat16"), None)
    model.config.use_cache = False  # as transformers' Trainer leaves it
    for name, stated in (("silent", {}), ("on", {"use_cache": True}), ("off", {"use_cache": False})):
        of = shutil.copytree(base, tmp_path / f"base-{name}")
        config = {key: value for key, value in json.loads((base / "config.json").read_text()).items() if key != "use_cache"}
        (of / "config.json").write_text(json.dumps(config | stated))
        save_whole_weights(model, of, full("bfloat16"), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["use_cache"] is (name != "off")


def test_published_weights_are_split_into_files_like_transformers(tmp_path: Path) -> None:
    """With twelve layers, alphabetical order differs from model order: layer 10 precedes layer 2."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12)).save_pretrained(tmp_path / "base")
    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    checkpoint = spread(trained, tmp_path / "checkpoint", 3)
    with torch.device("meta"):
        shape: Any = LlamaForCausalLM(trained.config)
    (tmp_path / "spread").mkdir()
    consolidate_weights(ShardedTensors(sorted(checkpoint.glob("*"))), shape, tmp_path / "spread", largest="50KB")
    trained.save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    expected = {name: bytes for name, bytes in contents(tmp_path / "whole").items() if name.startswith("model")}
    assert len(expected) > 3 and contents(tmp_path / "spread") == expected


def test_published_weights_keep_the_tensor_names_of_the_base_files(tmp_path: Path) -> None:
    """Experts are separate tensors in the files, and one tensor in the model."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(tmp_path / "base")
    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        for weight in trained.parameters():
            weight += 0.01
    save_sharded_weights(
        (4, spread(trained, tmp_path / "checkpoint")), tmp_path / "base", full("float32"), tmp_path / "spread"
    )
    trained.save_pretrained(tmp_path / "whole")
    found, stored = load_file(tmp_path / "spread" / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    assert set(found) == set(stored) != {name for name, _ in trained.named_parameters()}
    assert contents(tmp_path / "spread")["model.safetensors"] == contents(tmp_path / "whole")["model.safetensors"]


def test_published_model_is_completed_when_base_files_hold_only_a_part(base: Path, trained: Any, tmp_path: Path) -> None:
    """The base files name tensors without the prefix of the whole model.

    The checkpoint has flat weights here, as with DeepSpeed.
    """
    part = shutil.copytree(base, tmp_path / "part")
    tensors = load_file(base / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, part / "model.safetensors")
    (tmp_path / "checkpoint").mkdir()
    weights = dict(trained.named_parameters())
    flat = {name: weight.detach().flatten() for name, weight in weights.items()}
    save_file(flat, tmp_path / "checkpoint" / "model-rows-00001-of-00001.safetensors")
    save_sharded_weights((4, tmp_path / "checkpoint"), part, full("float32"), tmp_path / "spread")
    found = load_file(tmp_path / "spread" / "model.safetensors")
    assert set(found) == set(weights) and all(found[name].equal(weight) for name, weight in weights.items())


@pytest.mark.slow
def test_publishing_240_mb_of_weights_takes_less_than_100_mb_of_memory(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, tie_word_embeddings=True
    )
    model: Any = LlamaForCausalLM(config)
    checkpoint = spread(model, tmp_path / "checkpoint")
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) > 240 << 20
    model.bfloat16().save_pretrained(tmp_path / "base")
    (tmp_path / "recipe.json").write_text(full("bfloat16").model_dump_json())
    given = [str(tmp_path / name) for name in ("recipe.json", "checkpoint", "base", "out")]
    ended = subprocess.run([sys.executable, "-c", LIMITED, *given], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    model.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
