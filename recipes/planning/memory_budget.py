"""Estimate the memory that a recipe needs on one GPU, in bytes, by component.

Pure functions. Exact: weights, gradients and optimizer states, which a test compares with the tensors of real runs.
Modelled: activations (`recipes.planning.activation_memory`). Allowances: `CUDA_CONTEXT_BYTES`, `NCCL_BYTES`,
`FRAGMENTATION_SHARE`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from recipes.contracts.recipe import Recipe
from recipes.planning.activation_memory import ForwardPass, saved_activation_bytes, temporary_bytes
from recipes.planning.architecture import Architecture, TensorGroup
from recipes.planning.gpus import FLASH_ATTENTION_HEAD_SIZES, GIB
from recipes.planning.parallel_layout import (
    count_micro_batches_in_flight,
    fsdp_config,
    holds_whole_model,
    stage_shapes,
    zero_stage,
)

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
TRAINED_DTYPE = "float32"
"""Dtype of trained weights, independent of the compute dtype: of adapters (`autocast_adapter_dtype` of `get_peft_model`) and
of full training."""

CUDA_CONTEXT_BYTES = 0.75 * GIB
"""Allowance for the CUDA context, kernels and cuBLAS workspaces, which PyTorch's statistics do not include."""
NCCL_BYTES = 1.0 * GIB
"""Allowance for NCCL's channels and buffers with more than one GPU."""
FRAGMENTATION_SHARE = 0.05
"""Share that PyTorch's caching allocator reserves in addition to used memory."""
ZERO_BUCKET_ELEMENTS = 500_000_000
"""Elements of each gradient buffer of DeepSpeed 0.19, independent of the model's size (`reduce_bucket_size`)."""
ZERO_LIVE_ELEMENTS = 1_000_000_000
"""Elements of gathered weights that DeepSpeed keeps for reuse (`max_live_parameters`, `max_reuse_distance`)."""
HOST_PROCESS_BYTES = 1.0 * GIB
"""Allowance for Python with torch, transformers and peft when training on the CPU."""

NF4_BLOCK_ELEMENTS = 64
"""Weights per NF4 constant (Dettmers et al. 2023, QLoRA, section 3)."""
CONSTANT_BLOCK_ELEMENTS = 256
"""Constants per second-level constant with double quantization; also 8-bit optimizer states per constant."""
MIN_8BIT_ELEMENTS = 4096
"""Minimum elements of a tensor for which bitsandbytes uses 8-bit states."""
OPTIMIZER_MAP_BYTES = 2 * 256 * 4
"""The two code tables of bitsandbytes' 8-bit Adam, one of each per optimizer."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes in use on one device at the worst moment of a training step.

    On a CPU, this is the memory of the process.
    """

    weights: float
    adapter: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    gathered: float
    allowance: float

    @property
    def needed(self) -> float:
        parts: dict[str, float] = asdict(self)
        return sum(parts.values())

    @property
    def certain(self) -> float:
        """The budget without allowances: what is needed for certain."""
        return self.needed - self.allowance


def estimate_memory(recipe: Recipe, shape: Architecture) -> MemoryBudget:
    """Return the budget of a recipe per GPU.

    With pipelining, of the stage that needs most.

    Raises:
        BadConfiguration: an adapter target is no module of this model.
    """
    return max(estimate_stages(recipe, shape), key=lambda budget: budget.needed)


def estimate_stages(recipe: Recipe, shape: Architecture) -> list[MemoryBudget]:
    """Return the budget of each pipeline stage.

    A single one if all GPUs need the same.
    """
    if recipe.stages == 1:
        return [estimate_stage(recipe, shape)]
    return [
        estimate_stage(recipe, stage, held=count_micro_batches_in_flight(recipe, rank), heads=stage.heads)
        for rank, stage in enumerate(stage_shapes(recipe, shape))
    ]


def estimate_stage(recipe: Recipe, shape: Architecture, held: int = 1, *, heads: bool = True) -> MemoryBudget:
    """Return the memory budget of one GPU.

    The GPU stores the activations of `held` micro-batches; if `heads`, it also computes logits.

    Sharding follows ZeRO (Rajbhandari et al. 2020, section 3): ddp replicates everything; zero2 shards gradients and
    optimizer states; zero3 and fsdp full_shard shard weights too, and gather a block's weights to compute it. If fsdp shards
    the base of an adapter, the adapter with its gradients and states is replicated. With tensor parallelism, a part of the
    model is sharded and gathered, and only its share of heads and intermediate size is computed.

    Raises:
        BadConfiguration: an adapter target is no module of this model.
    """
    part = shape.tensor_parallel_part(recipe.tensor_parallel)
    trained = trained_tensors(recipe, part)
    trained_width = (
        DTYPE_BYTES[recipe.computing_dtype] if recipe.method == "full" and zero_stage(recipe) else DTYPE_BYTES[TRAINED_DTYPE]
    )
    frozen = frozen_bytes(recipe, part) if recipe.method != "full" else 0
    elements = sum(tensors.total for tensors in trained)
    sizes = elements * trained_width
    # DeepSpeed is configured to accumulate in float32 too (`deepspeed_config`)
    gradients = elements * DTYPE_BYTES[TRAINED_DTYPE]
    strategy = recipe.distributed.strategy if recipe.distributed else None
    shards = recipe.data_parallel
    weight_shards = shards if strategy in ("fsdp", "deepspeed_zero3") else 1
    whole = strategy == "fsdp" and recipe.method != "full"  # an adapter with its gradients and states
    adapter_shards = 1 if whole else weight_shards
    state_shards = shards if strategy in ("fsdp", "deepspeed_zero3", "deepspeed_zero2") and not whole else 1
    logits = shape.vocab_size if heads else 0
    forward = build_forward_pass(recipe, part.model_copy(update={"vocab_size": logits}))  # logits are gathered
    # Full DPO holds a frozen copy of the base, sharded like the trained model.
    reference = sizes if recipe.method == "full" and recipe.objective == "dpo" else 0
    parts = {
        "weights": ((frozen if recipe.method != "full" else sizes) + reference) / weight_shards,
        "adapter": (sizes if recipe.method != "full" else 0) / adapter_shards,
        # ddp reduces gradients in buckets, a second copy (`gradient_as_bucket_view` is off by default).
        "gradients": gradients * (2 if strategy == "ddp" and shards > 1 else 1) / state_shards
        + bucket_bytes(recipe, elements, trained_width),
        "optimizer": optimizer_bytes(recipe.optimizer, trained, trained_width, master=bool(zero_stage(recipe)))
        / state_shards,
        "activations": float(held * saved_activation_bytes(forward)),
        "working": float(temporary_bytes(forward)) + (sizes / 2 if copies_trained_weights(recipe) else 0),
        "gathered": gathered_bytes(recipe, part) if weight_shards > 1 else 0.0,
    }
    used = sum(parts.values())
    if recipe.hardware.gpus == 0:
        return MemoryBudget(**parts, allowance=HOST_PROCESS_BYTES)
    apart = CUDA_CONTEXT_BYTES + (NCCL_BYTES if recipe.processes > 1 else 0)
    return MemoryBudget(**parts, allowance=apart + FRAGMENTATION_SHARE * used)


def uses_autocast(recipe: Recipe) -> bool:
    """Return whether float32 weights have 16-bit copies until the backward pass is done.

    Not with sharding.
    """
    shards = fsdp_config(recipe)
    is_spread = bool(zero_stage(recipe) or (shards and recipe.data_parallel > 1))
    return recipe.method == "full" and recipe.computing_dtype != "float32" and not is_spread


def copies_trained_weights(recipe: Recipe) -> bool:
    """Return whether trained weights have 16-bit copies until the backward pass is done.

    Copies of an adapter in a recomputed block are freed with the block.
    """
    return uses_autocast(recipe) or (adapter_uses_compute_dtype(recipe) and not recipe.gradient_checkpointing)


def adapter_uses_compute_dtype(recipe: Recipe) -> bool:
    """Return whether an adapter computes in the model's dtype instead of its own.

    Only if it is complete in each process or stage: DeepSpeed treats adapters differently. Not in float16, whose gradients
    are scaled by the number of tokens in a step (`recipes.training.precision`): a mean gradient of 2 would overflow.
    """
    return recipe.method != "full" and recipe.computing_dtype == "bfloat16" and zero_stage(recipe) is None


def compiles_blocks(recipe: Recipe) -> bool:
    """Return whether blocks are compiled: on a GPU, with packed rows and an unsharded model.

    Sharded models and custom objectives may be compiled too, but are estimated as if they were not, which needs at least as
    much.
    """
    return recipe.hardware.gpus > 0 and recipe.objective == "sft" and holds_whole_model(recipe)


def uses_attention_mask(recipe: Recipe, shape: Architecture) -> bool:
    """Return whether attention separates packed examples by a mask.

    The alternative is `training.packed_attention`.
    """
    flash = recipe.computing_dtype != "float32" and shape.head_size in FLASH_ATTENTION_HEAD_SIZES
    return not (compiles_blocks(recipe) and flash)


def trained_tensors(recipe: Recipe, shape: Architecture) -> tuple[TensorGroup, ...]:
    """Return the trained parameters. Raises BadConfiguration if a target is no module of this model."""
    return shape.tensors if recipe.method == "full" else shape.adapter(recipe.lora_rank, recipe.lora_target_modules)


def frozen_bytes(recipe: Recipe, shape: Architecture) -> int:
    """Return the size of the weights under an adapter.

    With NF4 only projections of blocks are quantized.
    """
    if recipe.base_dtype != "nf4":
        return shape.parameters * DTYPE_BYTES[recipe.base_dtype]
    width = DTYPE_BYTES[recipe.computing_dtype]
    return sum(
        t.copies * nf4_bytes(t.elements, recipe.double_quant) if t.projection else t.total * width for t in shape.tensors
    )


def nf4_bytes(elements: int, double_quant: bool) -> int:
    """Return the bytes of an NF4 weight with its constants and code table.

    As computed per tensor by bitsandbytes 0.50.
    """
    constants = count_blocks(elements, NF4_BLOCK_ELEMENTS)
    code = 16 * 4
    if not double_quant:
        return count_blocks(elements, 2) + constants * 4 + code
    nested = count_blocks(constants, CONSTANT_BLOCK_ELEMENTS) * 4 + 256 * 4 + 4
    return count_blocks(elements, 2) + constants + nested + code


def count_blocks(elements: int, size: int) -> int:
    return -(-elements // size)


def optimizer_bytes(optimizer: str, trained: Iterable[TensorGroup], width: int, *, master: bool = False) -> int:
    """Return the size of the optimizer's state on the device: two moments per trained parameter.

    `adamw`: in the parameters' dtype, and a step counter per tensor (torch.optim.AdamW). `adamw_8bit`: one byte each, and a
    constant per block (Dettmers et al. 2022). `paged_adamw`: in host memory, paged in on demand. With `master`, a copy of
    the weights and both moments are float32 in any case: 12 bytes per parameter (ZeRO, section 3.1; DeepSpeed 0.19 copies
    float32 weights too).
    """
    if optimizer == "paged_adamw":
        return 0
    if optimizer == "adamw_8bit":
        return OPTIMIZER_MAP_BYTES + sum(tensors.copies * optimizer_8bit_bytes(tensors.elements) for tensors in trained)
    each = 12 if master else 2 * width
    return sum(tensors.copies * (tensors.elements * each + 4) for tensors in trained)


def paged_optimizer_bytes(recipe: Recipe, shape: Architecture) -> int:
    """Return the size of the moments that `paged_adamw` may keep in host memory."""
    if recipe.optimizer != "paged_adamw":
        return 0
    return optimizer_bytes("adamw", trained_tensors(recipe, shape), DTYPE_BYTES[TRAINED_DTYPE])


def optimizer_8bit_bytes(elements: int) -> int:
    if elements < MIN_8BIT_ELEMENTS:
        return 2 * 4 * elements
    return 2 * (elements + 4 * count_blocks(elements, CONSTANT_BLOCK_ELEMENTS))


def bucket_bytes(recipe: Recipe, elements: int, width: int) -> int:
    """Return the size of DeepSpeed's gradient buffers.

    Stage 2 alternates between two in the weights' dtype, stage 3 has one in float32. On a host, pages are only allocated
    when written, and never more than all gradients need.
    """
    size = ZERO_BUCKET_ELEMENTS if recipe.hardware.gpus else min(ZERO_BUCKET_ELEMENTS, elements)
    return {2: 2 * width * size, 3: DTYPE_BYTES[TRAINED_DTYPE] * size}.get(zero_stage(recipe) or 0, 0)


def gathered_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return the size of gathered weights in addition to shards.

    The root's, and two blocks' due to prefetching. DeepSpeed keeps more of a small model. In full training, gradients of one
    block and of the root are gathered too until they are reduced.
    """
    width = DTYPE_BYTES[recipe.computing_dtype]
    root = sum(tensors.total for tensors in shape.root_tensors) * width
    block = sum(tensors.total for tensors in shape.block_tensors) * width
    resident = root + 2 * block
    if zero_stage(recipe) == 3:
        resident = max(resident, min(ZERO_LIVE_ELEMENTS, shape.parameters) * width)
    return float(resident + (root + block if recipe.method == "full" else 0))


def build_forward_pass(recipe: Recipe, shape: Architecture) -> ForwardPass:
    """Describe the forward pass.

    With autocast, norms and sums stay in float32; assuming that for everything is an upper bound.
    """
    adapts = recipe.method != "full"
    return ForwardPass(
        architecture=shape,
        rows=recipe.sequences,
        length=recipe.sequence_length,
        width=DTYPE_BYTES["float32" if uses_autocast(recipe) else recipe.computing_dtype],
        rank=recipe.lora_rank if adapts else 0,
        targets=recipe.lora_target_modules if adapts else (),
        dropout=adapts and recipe.lora_dropout > 0,
        checkpointing=recipe.gradient_checkpointing,
        adapter=DTYPE_BYTES[recipe.computing_dtype if adapter_uses_compute_dtype(recipe) else TRAINED_DTYPE],
        compiled=compiles_blocks(recipe),
        masked=uses_attention_mask(recipe, shape),
    )
