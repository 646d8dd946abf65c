"""The memory budget against real tensors: equal where exact, otherwise within 5 %."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import PAIR_OBJECTIVES_GROUP
from recipes.planning.activation_memory import ForwardPass, saved_activation_bytes, temporary_bytes
from recipes.planning.architecture import Architecture, TensorGroup
from recipes.planning.gpus import GIB
from recipes.planning.memory_budget import (
    CUDA_CONTEXT_BYTES,
    FRAGMENTATION_SHARE,
    HOST_PROCESS_BYTES,
    NCCL_BYTES,
    ZERO_BUCKET_ELEMENTS,
    ZERO_LIVE_ELEMENTS,
    build_forward_pass,
    estimate_memory,
    nf4_bytes,
    optimizer_bytes,
)
from recipes.planning.recipe_checks import ASSUMED_SHAPES, PUBLISHED_SHAPES, resolve_shape
from recipes.training.lora import compute_lora_in_input_dtype
from recipes.training.token_loss import use_token_losses
from resources.estimate.job_estimate import DatasetTokens, total_tokens
from tests.recipes.training.tracked_runs import install

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS, LENGTH = 2, 96


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on matrices of 64 columns, synchronization costs more than computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(model_type: str, *, tied: bool = False) -> Architecture:
    return Architecture(
        model_type=model_type,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=96,
        vocab_size=400,
        tie_word_embeddings=tied,
        max_position_embeddings=1024,
    )


def build(shape: Architecture, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    config = AutoConfig.for_model(**shape.model_dump(exclude_none=True))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    use_token_losses(model)
    return model


def recipe(**changes: Any) -> Recipe:
    tiny_one = {"batch_size": ROWS, "sequence_length": LENGTH, "lora_rank": 8, "base_dtype": "float32"}
    return Recipe.named("smollm2-135m-lora").changed(tiny_one | changes)


def full(**changes: Any) -> Recipe:
    method = {"method": "full", "lora_target_modules": [], "lora_rank": 16, "base_dtype": "bfloat16"}
    return recipe(**method, **({"dtype": "float32"} | changes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_parameter_count_equals_built_model(family: str, tied: bool) -> None:
    shape = tiny(family, tied=tied)
    assert shape.parameters == sum(parameter.numel() for parameter in build(shape, device="meta").parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_parameter_count_equals_built_model_without_head_dim(family: str) -> None:
    """Qwen3's heads are 128 wide for any hidden size; assuming 16 was 40 % short."""
    shape = tiny(family).model_copy(update={"head_dim": None})
    assert shape.parameters == sum(parameter.numel() for parameter in build(shape, device="meta").parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_shape_names_all_modules_an_adapter_can_target(family: str) -> None:
    model = build(tiny(family), device="meta")
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    assert {name for name, module in model.named_modules() if isinstance(module, kinds)} == set(tiny(family).modules)


@pytest.mark.parametrize("name", [*ASSUMED_SHAPES, *PUBLISHED_SHAPES])
def test_parameter_count_equals_built_model_for_every_known_base_model(name: str) -> None:
    shape = (ASSUMED_SHAPES | PUBLISHED_SHAPES)[name]
    assert shape.parameters == sum(parameter.numel() for parameter in build(shape, device="meta").parameters())


def test_a_shape_is_read_from_a_model_s_own_configuration() -> None:
    shape = tiny("qwen3")
    assert Architecture.from_config(build(shape, device="meta").config.to_dict()) == shape


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"hidden_size": None}, {"attention_bias": True}])
def test_unsupported_model_configuration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfiguration):
        Architecture.from_config(build(tiny("llama"), device="meta").config.to_dict() | changes)


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, counting each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def after_a_step(model: Any) -> tuple[Any, torch.optim.AdamW]:
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    tokens = torch.randint(0, 400, (ROWS, LENGTH))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    return model, optimizer


def states(optimizer: torch.optim.Optimizer) -> int:
    return stored(value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_fine_tuning_budget_equals_measured_bytes(dtype: str) -> None:
    shape = tiny("qwen2")
    model, optimizer = after_a_step(build(shape))  # float32 weights, for any compute dtype
    budget = estimate_memory(full(dtype=dtype), shape)
    assert budget.weights == stored(model.parameters())
    assert budget.gradients == stored(parameter.grad for parameter in model.parameters())
    assert budget.optimizer == states(optimizer)
    assert budget.adapter == 0


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_budget_equals_measured_bytes(dtype: str, targets: tuple[str, ...]) -> None:
    shape = tiny("llama", tied=True)
    config = LoraConfig(r=8, target_modules=list(targets), task_type="CAUSAL_LM")
    model, optimizer = after_a_step(get_peft_model(build(shape, getattr(torch, dtype)), config))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    budget = estimate_memory(recipe(base_dtype=dtype, lora_target_modules=targets), shape)
    assert budget.weights == stored(parameter for parameter in model.parameters() if not parameter.requires_grad)
    assert budget.adapter == stored(trained)
    assert budget.gradients == stored(parameter.grad for parameter in trained)
    assert budget.optimizer == states(optimizer)


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("sizes", [(64, 96), (128, 300), (576, 1536)])
def test_nf4_weight_bytes_equal_bitsandbytes(sizes: tuple[int, int], double_quant: bool) -> None:
    packed, state = quantize_4bit(
        torch.randn(sizes, dtype=torch.bfloat16), blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    made = [packed, state.absmax, state.code]
    if double_quant:
        made += [state.offset, state.state2.absmax, state.state2.code]
    assert nf4_bytes(sizes[0] * sizes[1], double_quant) == stored(made)


def test_adamw_8bit_state_bytes_equal_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers keeps embeddings in 32 bits by overrides per `id(weight)` and optimizer position, which are global:
    # overrides left by another test could match a weight created here.
    for overrides in ("pid2config", "index2config"):
        monkeypatch.setattr(bnb.optim.GlobalOptimManager.get_instance(), overrides, {})
    weights = [torch.nn.Parameter(torch.randn(size)) for size in ((64, 96), (10, 10), (64, 64), (301, 300))]
    optimizer = bnb.optim.AdamW8bit(weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer_bytes("adamw_8bit", [TensorGroup("w", w.numel()) for w in weights], width=4) == states(optimizer)


def kept_by(model: Any, texts: int = 2) -> int:
    """Measure the bytes autograd saves for a packed micro-batch with `texts` texts per row."""
    own = {tensor.untyped_storage()._cdata for tensor in itertools.chain(model.parameters(), model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tokens = torch.randint(0, 400, (ROWS, LENGTH))
    positions = torch.arange(LENGTH // texts).repeat(texts).expand(ROWS, LENGTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss
    assert loss.isfinite()
    return stored(kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("dtype", "adapter"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 2)], ids=["32", "16", "16 and adapter"]
)
@pytest.mark.parametrize(
    ("family", "targets", "dropout"),
    [
        ("llama", (), 0.0),
        ("qwen2", ALL, 0.0),
        ("qwen2", ALL, 0.1),
        ("llama", ALL[:4], 0.0),
        ("llama", ("q_proj", "v_proj"), 0.1),
        ("qwen3", (), 0.0),
        ("qwen3", ("k_proj", "down_proj"), 0.0),
    ],
)
def test_activation_estimate_is_within_5_percent_of_autograd(
    family: str, targets: tuple[str, ...], dropout: float, dtype: torch.dtype, adapter: int, checkpointing: bool
) -> None:
    shape = tiny(family)
    model = build(shape, dtype)
    if targets:
        config = LoraConfig(r=8, lora_dropout=dropout, target_modules=list(targets), task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        if adapter < 4:
            compute_lora_in_input_dtype(model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    rank = 8 if targets else 0
    forward = ForwardPass(shape, ROWS, LENGTH, dtype.itemsize, rank, targets, dropout > 0, checkpointing, adapter)
    assert saved_activation_bytes(forward) == pytest.approx(kept_by(model), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets", "dropout", "dtype", "adapter", "masked"),
    [
        ("llama", ALL, 0.0, torch.bfloat16, 2, False),
        pytest.param("qwen2", ALL, 0.1, torch.bfloat16, 2, False, marks=pytest.mark.long),
        ("qwen3", ("q_proj", "v_proj"), 0.1, torch.bfloat16, 2, False),
        pytest.param("llama", ALL, 0.0, torch.bfloat16, 4, False, marks=pytest.mark.long),
        ("llama", (), 0.0, torch.bfloat16, 4, False),
        pytest.param("llama", (), 0.0, torch.float32, 4, True, marks=pytest.mark.long),
        ("llama", ALL, 0.0, torch.float32, 4, True),
    ],
)
def test_activation_estimate_is_within_5_percent_with_compiled_blocks(
    family: str, targets: tuple[str, ...], dropout: float, dtype: torch.dtype, adapter: int, masked: bool
) -> None:
    """Uses PyTorch's own partitioner; rows with a single text need no mask."""
    shape = tiny(family)
    base = model = build(shape, dtype)
    if targets:
        config = LoraConfig(r=8, lora_dropout=dropout, target_modules=list(targets), task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
        if adapter < 4:
            compute_lora_in_input_dtype(model)
    torch.compiler.reset()
    for block in base.model.layers:
        block.compile(dynamic=False, backend="aot_eager_decomp_partition")
    rank, width = 8 if targets else 0, dtype.itemsize
    forward = ForwardPass(
        shape, ROWS, LENGTH, width, rank, targets, dropout > 0, adapter=adapter, compiled=True, masked=masked
    )
    assert saved_activation_bytes(forward) == pytest.approx(kept_by(model.train(), texts=2 if masked else 1), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "compiled", "masked", "adapter"),
    [
        ({}, True, False, 2),
        ({"base_dtype": "float16"}, True, False, 4),
        ({"base_dtype": "float32"}, True, True, 4),
        ({"objective": "dpo"}, False, True, 2),
        ({"distributed": {"strategy": "ddp", "gpus_per_node": 8}}, True, False, 2),
        ({"distributed": {"strategy": "fsdp", "gpus_per_node": 8}}, False, True, 2),
        ({"distributed": {"strategy": "deepspeed_zero2", "gpus_per_node": 8}}, False, True, 4),
        ({"hardware": {"cpu": 2}}, False, True, 2),
    ],
    ids=str,
)
def test_forward_pass_estimate_knows_compilation_mask_and_adapter_width(
    changes: dict[str, Any], compiled: bool, masked: bool, adapter: int
) -> None:
    gpus = {"gpus": 8 if "distributed" in changes else 1, "gpu_type": "nvidia-h100-80gb"}
    found = build_forward_pass(*zen("zen-7b-lora", **{"base_dtype": "bfloat16", "hardware": gpus, **changes}))
    assert (found.compiled, found.masked, found.adapter) == (compiled, masked, adapter)


@pytest.mark.parametrize(("method", "dropout", "keeps"), [("lora", 0.0, False), ("lora", 0.1, True), ("full", None, False)])
def test_dropout_mask_is_budgeted_only_with_dropout(method: str, dropout: float | None, keeps: bool) -> None:
    changes = {} if dropout is None else {"lora_dropout": dropout}
    assert build_forward_pass(*zen(f"zen-7b-{method}", **changes)).dropout == keeps


def zen(name: str, **changes: Any) -> tuple[Recipe, Architecture]:
    found = Recipe.named(name)
    return found.changed(changes) if changes else found, resolve_shape(found)


def shared(strategy: str, gpus: int = 8) -> dict[str, Any]:
    return {"distributed": {"strategy": strategy, "num_nodes": 1, "gpus_per_node": gpus}}


def test_sharding_divides_memory_by_zero_stage() -> None:
    whole = estimate_memory(*zen("zen-7b-full", distributed=None, hardware={"gpus": 1, "gpu_type": "nvidia-a100-80gb"}))
    copied, zero2, zero3, fsdp = (
        estimate_memory(*zen("zen-7b-full", **shared(strategy)))
        for strategy in ("ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp")
    )
    assert copied.weights == whole.weights and copied.optimizer == whole.optimizer
    assert copied.gradients == 2 * whole.gradients  # plus the gradient buckets
    assert fsdp.weights == whole.weights / 8 and fsdp.gradients == whole.gradients / 8
    assert fsdp.optimizer == whole.optimizer / 8
    # DeepSpeed: weights in bfloat16; gradients, master weights and both moments in float32 (12 bytes instead of 8).
    assert zero2.weights == whole.weights / 2 == 8 * zero3.weights
    assert (
        zero2.gradients - 2 * 2 * ZERO_BUCKET_ELEMENTS == zero3.gradients - 4 * ZERO_BUCKET_ELEMENTS == fsdp.gradients
    )  # without DeepSpeed's buffers
    assert zero2.optimizer == zero3.optimizer == pytest.approx(1.5 * whole.optimizer / 8, rel=1e-5)
    eight = {"hardware": {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}}
    adapter = estimate_memory(*zen("zen-7b-lora", **shared("ddp"), **eight))
    zero2 = estimate_memory(*zen("zen-7b-lora", **shared("deepspeed_zero2"), **eight))
    assert zero2.optimizer == pytest.approx(1.5 * adapter.optimizer / 8, rel=1e-3)  # also with a float32 adapter
    assert fsdp.gathered > 0 and copied.gathered == zero2.gathered == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_zero3"])
def test_communication_buffers_are_budgeted_only_for_several_processes(strategy: str) -> None:
    """NCCL buffers are as large as a small adapter's budget; a single process has none."""
    alone, both = (
        estimate_memory(
            *zen("zen-7b-full", **shared(strategy, gpus), hardware={"gpus": gpus, "gpu_type": "nvidia-a100-80gb"})
        )
        for gpus in (1, 2)
    )
    assert alone.allowance == pytest.approx(CUDA_CONTEXT_BYTES + FRAGMENTATION_SHARE * alone.certain)
    assert both.allowance == pytest.approx(CUDA_CONTEXT_BYTES + NCCL_BYTES + FRAGMENTATION_SHARE * both.certain)
    assert alone.gathered == 0 and (both.gathered > 0) == (strategy != "ddp")
    if strategy == "ddp":
        assert both.gradients == 2 * alone.gradients


def test_float32_weights_have_16_bit_copies_when_unsharded() -> None:
    one = {"hardware": {"gpus": 1, "gpu_type": "nvidia-a100-80gb"}}
    alone, sharded_alone = zen("zen-7b-full", distributed=None, **one), zen("zen-7b-full", **shared("fsdp", 1), **one)
    budget = estimate_memory(*alone)
    assert budget.working == temporary_bytes(build_forward_pass(*alone)) + budget.weights / 2
    assert estimate_memory(*sharded_alone).working == budget.working, "of one process there are no shards"
    spread = zen("zen-7b-full", **shared("fsdp", 8))
    assert estimate_memory(*spread).working == temporary_bytes(build_forward_pass(*spread))


def test_host_allowance_is_the_process_itself() -> None:
    assert estimate_memory(*zen("smollm2-135m-lora")).allowance == HOST_PROCESS_BYTES


def test_deepspeed_keeps_the_gathered_weights_of_a_small_model() -> None:
    """It keeps a billion gathered weights for reuse: a small model is completely gathered."""
    eight = {"hardware": {"gpus": 8, "gpu_type": "nvidia-a100-80gb"}}
    small, large = (
        (estimate_memory(recipe, resolve_shape(recipe)), resolve_shape(recipe))
        for recipe in (
            Recipe.named("smollm2-135m-lora").changed({**shared("deepspeed_zero3"), **eight}),
            zen("zen-7b-lora", **shared("deepspeed_zero3"), **eight)[0],
        )
    )
    assert small[0].gathered == 2 * small[1].parameters
    assert 2 * ZERO_LIVE_ELEMENTS <= large[0].gathered < 2 * large[1].parameters
    largest = estimate_memory(*zen("zen-72b-lora", **shared("deepspeed_zero3", 4)))
    assert largest.gathered > 2.4 * ZERO_LIVE_ELEMENTS, "its embeddings and its head alone are more than a billion"


def test_host_buffers_count_only_bytes_written() -> None:
    """Untouched host buffers use no memory: counting 4 GB would refuse a tiny run."""
    recipe = Recipe.named("smollm2-135m-lora").changed(shared("deepspeed_zero2", 2))
    copied = Recipe.named("smollm2-135m-lora").changed(shared("ddp", 2))
    shape = resolve_shape(recipe)
    assert estimate_memory(recipe, shape).gradients < 2 * estimate_memory(copied, shape).gradients
    on_gpus = recipe.changed({"hardware": {"gpus": 2, "gpu_type": "nvidia-a100-80gb"}})
    assert estimate_memory(on_gpus, shape).gradients > 2 * 4 * ZERO_BUCKET_ELEMENTS, (
        "there it is taken, however little is written"
    )


def test_fsdp_keeps_the_adapter_unsharded_in_each_process() -> None:
    four = {"hardware": {"gpus": 4, "gpu_type": "nvidia-a100-80gb"}}
    copied = estimate_memory(*zen("zen-72b-lora", **shared("ddp", 4), **four))
    sharded, spread = (estimate_memory(*zen("zen-72b-lora", **shared(name, 4))) for name in ("fsdp", "deepspeed_zero3"))
    assert sharded.weights == spread.weights == copied.weights / 4
    assert sharded.adapter == copied.adapter == 4 * spread.adapter
    assert sharded.gradients == copied.gradients / 2 and sharded.optimizer == copied.optimizer  # ddp also has buckets


def test_tensor_parallelism_divides_gathered_weights_and_activations() -> None:
    shape = {"strategy": "fsdp", "num_nodes": 4}
    spread, cut = (
        estimate_memory(*zen("zen-72b-full", gradient_checkpointing=False, distributed=shape | {"tensor_parallel": parts}))
        for parts in (1, 8)
    )
    for part in ("weights", "gradients", "optimizer"):  # except for norms, which every process holds completely
        assert getattr(cut, part) == pytest.approx(getattr(spread, part), rel=2e-4)
    assert cut.gathered == pytest.approx(spread.gathered / 8, rel=2e-4)
    assert spread.activations / 8 < cut.activations < spread.activations / 2
    alone = estimate_memory(*zen("zen-72b-full", distributed={"strategy": "fsdp", "tensor_parallel": 8}))
    assert alone.weights == pytest.approx(4 * spread.weights, rel=2e-4) and alone.gathered == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensor_parallel_parts_divide_all_weights_but_norms(family: str) -> None:
    shape = tiny(family)
    norms = sum(tensors.total for tensors in shape.tensors if "norm" in tensors.name)
    assert 2 * shape.tensor_parallel_part(2).parameters - norms == shape.parameters


def test_preference_pairs_double_activations_and_full_dpo_adds_a_reference_model() -> None:
    shape = tiny("llama")
    plain, pairs = (estimate_memory(full(objective=name), shape) for name in ("sft", "dpo"))
    twice = estimate_memory(full(batch_size=2 * ROWS), shape)
    assert pairs.activations == twice.activations > plain.activations
    assert pairs.weights == 2 * plain.weights
    spread, sft = (estimate_memory(full(objective=name, **shared("fsdp")), shape).weights for name in ("dpo", "sft"))
    assert spread == 2 * sft == pairs.weights / 8
    assert estimate_memory(full(objective="orpo"), shape).weights == plain.weights


def test_installed_objective_declaring_pairs_is_budgeted_for_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: installed objectives were budgeted for one sequence per row and ran out of memory.

    The objective class is not importable here, because job admission has no torch.
    """
    install("simpo", "raise AssertionError", tmp_path, monkeypatch, PAIR_OBJECTIVES_GROUP)
    install("plain", "raise AssertionError", tmp_path, monkeypatch)
    shape = tiny("llama")
    one, two = (full(objective=name) for name in ("plain", "simpo"))
    assert estimate_memory(two, shape) == estimate_memory(full(objective="orpo"), shape)
    assert estimate_memory(one, shape) == estimate_memory(full(objective="sft"), shape)
    assert two.tokens_per_step == 2 * one.tokens_per_step
    dataset = DatasetTokens(40_000, 4_000, "counted")
    assert (total_tokens(two, dataset), total_tokens(one, dataset)) == (
        10 * two.samples_per_step * two.max_steps,
        one_long(one),
    )


def one_long(recipe: Recipe) -> int:
    """Return the number of tokens if every row has the maximum length."""
    return recipe.samples_per_step * recipe.sequence_length * recipe.max_steps


@pytest.mark.requirement("L8")
def test_zen_recipes_need_the_recorded_memory() -> None:
    """Recorded figures show how a change of the budget affects the recipes."""
    needed = {name: estimate_memory(*zen(name)).needed / GIB for name in Recipe.names() if name.startswith("zen")}
    assert needed == pytest.approx(
        {"zen-7b-lora": 24.8, "zen-72b-lora": 53.6, "zen-72b-qlora": 62.0, "zen-7b-full": 29.0, "zen-72b-full": 56.2},
        abs=0.05,
    )


@pytest.mark.requirement("L3")
def test_qlora_weights_are_70_to_75_percent_smaller_than_lora() -> None:
    """A quarter, plus the constants, embeddings and norms that are not quantized."""
    lora, _ = zen("zen-72b-lora", distributed=None, hardware={"gpus": 1, "gpu_type": "nvidia-a100-80gb"})
    qlora, shape = zen("zen-72b-qlora")
    assert 0.70 < 1 - estimate_memory(qlora, shape).weights / estimate_memory(lora, shape).weights < 0.75


@pytest.mark.requirement("L6")
def test_full_fine_tuning_is_three_to_four_times_the_model() -> None:
    """Weights, gradients and optimizer states, as in the method's documented memory profile."""
    budget = estimate_memory(*zen("zen-7b-full"))
    assert 3 <= (budget.weights + budget.gradients + budget.optimizer) / budget.weights <= 4.001


def test_unknown_lora_target_is_refused_with_the_known_modules() -> None:
    with pytest.raises(BadConfiguration, match=r"no 'c_attn'.*q_proj"):
        estimate_memory(recipe(lora_target_modules=["c_attn"]), tiny("llama"))
