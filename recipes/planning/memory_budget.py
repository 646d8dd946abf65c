"""How much memory one GPU needs for a recipe, part by part, before anything is started. Pure functions; figures in bytes.

What is exact: weights, gradients and optimizer states, which a test compares with the tensors of real runs. What is a model:
activations (`recipes.planning.activation_memory`). What is an allowance: `CUDA_CONTEXT_BYTES`, `NCCL_BYTES`,
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
"""What is trained, whatever it computes in: an adapter (`autocast_adapter_dtype` of `get_peft_model`), and all weights."""

CUDA_CONTEXT_BYTES = 0.75 * GIB
"""Allowance for the CUDA context, kernels and cuBLAS workspaces; none of it shows in PyTorch's own figures."""
NCCL_BYTES = 1.0 * GIB
"""Allowance for NCCL's channels and buffers, where there is more than one GPU."""
FRAGMENTATION_SHARE = 0.05
"""Share that PyTorch's caching allocator holds beyond what is in use."""
ZERO_BUCKET_ELEMENTS = 500_000_000
"""Elements of each buffer that DeepSpeed 0.19 brings gradients together in, however few they are (`reduce_bucket_size`)."""
ZERO_LIVE_ELEMENTS = 1_000_000_000
"""Elements of gathered weights that it keeps for their next use (`max_live_parameters`, `max_reuse_distance`)."""
HOST_PROCESS_BYTES = 1.0 * GIB
"""Allowance for Python with torch, transformers and peft, where the model is trained in the host's memory."""

NF4_BLOCK_ELEMENTS = 64
"""Weights that share one NF4 constant (Dettmers et al. 2023, QLoRA, section 3)."""
CONSTANT_BLOCK_ELEMENTS = 256
"""Constants that share one constant of their own, with double quantization; and 8-bit optimizer states that share one."""
MIN_8BIT_ELEMENTS = 4096
"""Elements from which bitsandbytes keeps a tensor's states in 8 bits."""
OPTIMIZER_MAP_BYTES = 2 * 256 * 4
"""The two code tables of bitsandbytes' 8-bit Adam, one of each for the whole optimizer."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one GPU (of the one process, on a CPU) at the worst moment of a step."""

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
        """Without allowances: what is surely needed."""
        return self.needed - self.allowance


def estimate_memory(recipe: Recipe, shape: Architecture) -> MemoryBudget:
    """The budget of a recipe with a base model of that shape, for each GPU; of stages, for that which needs most.

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    return max(estimate_stages(recipe, shape), key=lambda budget: budget.needed)


def estimate_stages(recipe: Recipe, shape: Architecture) -> list[MemoryBudget]:
    """Of each stage; one, where every GPU needs as much."""
    if recipe.stages == 1:
        return [estimate_stage(recipe, shape)]
    return [
        estimate_stage(recipe, stage, held=count_micro_batches_in_flight(recipe, rank), heads=stage.heads)
        for rank, stage in enumerate(stage_shapes(recipe, shape))
    ]


def estimate_stage(recipe: Recipe, shape: Architecture, held: int = 1, *, heads: bool = True) -> MemoryBudget:
    """Of a GPU that has the activations of `held` micro-batches at once, and computes logits where it `heads`.

    Sharding is that of ZeRO (Rajbhandari et al. 2020, section 3): ddp copies everything; zero2 shards gradients and
    optimizer states; zero3 and fsdp full_shard shard weights too, and gather a block's when it is computed. Beside a base
    that fsdp shards, an adapter is whole in each process, with its gradients and states. With tensor parallelism it is a
    part of the model that is sharded and gathered, and whose heads and inner width are computed.

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    part = shape.tensor_parallel_part(recipe.tensor_parallel)
    trained = trained_tensors(recipe, part)
    trained_width = (
        DTYPE_BYTES[recipe.computing_dtype] if recipe.method == "full" and zero_stage(recipe) else DTYPE_BYTES[TRAINED_DTYPE]
    )
    frozen = frozen_bytes(recipe, part) if recipe.method != "full" else 0
    elements = sum(tensors.total for tensors in trained)
    sizes = elements * trained_width
    gradients = elements * DTYPE_BYTES[TRAINED_DTYPE]  # DeepSpeed too is told to add them up in float32 (`deepspeed_config`)
    strategy = recipe.distributed.strategy if recipe.distributed else None
    shards = recipe.data_parallel
    weight_shards = shards if strategy in ("fsdp", "deepspeed_zero3") else 1
    whole = strategy == "fsdp" and recipe.method != "full"  # an adapter, with all that belongs to it
    adapter_shards = 1 if whole else weight_shards
    state_shards = shards if strategy in ("fsdp", "deepspeed_zero3", "deepspeed_zero2") and not whole else 1
    logits = shape.vocab_size if heads else 0
    forward = build_forward_pass(recipe, part.model_copy(update={"vocab_size": logits}))  # logits are gathered
    # Full DPO keeps the base beside what it trains, and spread as that is.
    reference = sizes if recipe.method == "full" and recipe.objective == "dpo" else 0
    parts = {
        "weights": ((frozen if recipe.method != "full" else sizes) + reference) / weight_shards,
        "adapter": (sizes if recipe.method != "full" else 0) / adapter_shards,
        # ddp reduces gradients in buckets, which are a second copy (`gradient_as_bucket_view` is off by default).
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
    """Whether weights in float32 have copies in 16 bits beside them, until the backward pass is done; shards have none."""
    shards = fsdp_config(recipe)
    is_spread = bool(zero_stage(recipe) or (shards and recipe.data_parallel > 1))
    return recipe.method == "full" and recipe.computing_dtype != "float32" and not is_spread


def copies_trained_weights(recipe: Recipe) -> bool:
    """Whether what is trained has a copy in 16 bits beside it, until the backward pass is done.

    Of an adapter's block that is computed again, it is gone with the block.
    """
    return uses_autocast(recipe) or (adapter_uses_compute_dtype(recipe) and not recipe.gradient_checkpointing)


def adapter_uses_compute_dtype(recipe: Recipe) -> bool:
    """Whether an adapter computes in the type that the model does, and not in that of its weights.

    Where it is whole in each process, or in its stage: DeepSpeed has ways of its own with it. Not in float16, whose
    gradients are scaled as many times as a step has tokens (`recipes.training.precision`): one that is 2 in their mean
    would be infinite.
    """
    return recipe.method != "full" and recipe.computing_dtype == "bfloat16" and zero_stage(recipe) is None


def compiles_blocks(recipe: Recipe) -> bool:
    """Whether blocks are compiled: on a GPU, with packed rows and all of the model in place.

    Shards, and an objective of one's own, may have their blocks compiled too, and are reckoned as if they had not: they take
    no more than that.
    """
    return recipe.hardware.gpus > 0 and recipe.objective == "sft" and holds_whole_model(recipe)


def uses_attention_mask(recipe: Recipe, shape: Architecture) -> bool:
    """Whether attention keeps packed examples apart by a mask, and not by where they end (`training.packed_attention`)."""
    flash = recipe.computing_dtype != "float32" and shape.head_size in FLASH_ATTENTION_HEAD_SIZES
    return not (compiles_blocks(recipe) and flash)


def trained_tensors(recipe: Recipe, shape: Architecture) -> tuple[TensorGroup, ...]:
    """What the optimizer updates. Raises BadConfiguration where a target is no module of this model."""
    return shape.tensors if recipe.method == "full" else shape.adapter(recipe.lora_rank, recipe.lora_target_modules)


def frozen_bytes(recipe: Recipe, shape: Architecture) -> int:
    """The weights below an adapter. In NF4 are the projections of blocks alone; embeddings, head and norms are not."""
    if recipe.base_dtype != "nf4":
        return shape.parameters * DTYPE_BYTES[recipe.base_dtype]
    width = DTYPE_BYTES[recipe.computing_dtype]
    return sum(
        t.copies * nf4_bytes(t.elements, recipe.double_quant) if t.projection else t.total * width for t in shape.tensors
    )


def nf4_bytes(elements: int, double_quant: bool) -> int:
    """A weight in NF4 with its constants and code tables, as bitsandbytes 0.50 keeps them for each tensor."""
    constants = count_blocks(elements, NF4_BLOCK_ELEMENTS)
    code = 16 * 4
    if not double_quant:
        return count_blocks(elements, 2) + constants * 4 + code
    nested = count_blocks(constants, CONSTANT_BLOCK_ELEMENTS) * 4 + 256 * 4 + 4
    return count_blocks(elements, 2) + constants + nested + code


def count_blocks(elements: int, size: int) -> int:
    return -(-elements // size)


def optimizer_bytes(optimizer: str, trained: Iterable[TensorGroup], width: int, *, master: bool = False) -> int:
    """Two moments for each trained parameter, on the device.

    `adamw`: in the parameters' own type, and a step counter for each tensor (torch.optim.AdamW). `adamw_8bit`: one byte
    each and a constant for each block (Dettmers et al. 2022). `paged_adamw`: in the host's memory, paged in as needed. With
    `master`, there is a copy of the weights and moments in float32, whatever they are held in: 12 bytes a parameter (ZeRO,
    section 3.1; DeepSpeed 0.19 copies weights in float32 too).
    """
    if optimizer == "paged_adamw":
        return 0
    if optimizer == "adamw_8bit":
        return OPTIMIZER_MAP_BYTES + sum(tensors.copies * optimizer_8bit_bytes(tensors.elements) for tensors in trained)
    each = 12 if master else 2 * width
    return sum(tensors.copies * (tensors.elements * each + 4) for tensors in trained)


def paged_optimizer_bytes(recipe: Recipe, shape: Architecture) -> int:
    """What `paged_adamw` keeps of a GPU's moments outside of it: in the host's memory, as far as the GPU has no room."""
    if recipe.optimizer != "paged_adamw":
        return 0
    return optimizer_bytes("adamw", trained_tensors(recipe, shape), DTYPE_BYTES[TRAINED_DTYPE])


def optimizer_8bit_bytes(elements: int) -> int:
    if elements < MIN_8BIT_ELEMENTS:
        return 2 * 4 * elements
    return 2 * (elements + 4 * count_blocks(elements, CONSTANT_BLOCK_ELEMENTS))


def bucket_bytes(recipe: Recipe, elements: int, width: int) -> int:
    """Of DeepSpeed's buffers for gradients: with stage 2 two by turns, in the type of the weights, with 3 one in float32.

    A host gives pages where something is written, and no more than all gradients ever is.
    """
    size = ZERO_BUCKET_ELEMENTS if recipe.hardware.gpus else min(ZERO_BUCKET_ELEMENTS, elements)
    return {2: 2 * width * size, 3: DTYPE_BYTES[TRAINED_DTYPE] * size}.get(zero_stage(recipe) or 0, 0)


def gathered_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Whole weights that stand beside the shards: the root's, and two blocks', since the next is fetched ahead; DeepSpeed
    keeps more of a small model.

    Where they are trained, one block's gradients and the root's stand whole too until they are reduced.
    """
    width = DTYPE_BYTES[recipe.computing_dtype]
    root = sum(tensors.total for tensors in shape.root_tensors) * width
    block = sum(tensors.total for tensors in shape.block_tensors) * width
    resident = root + 2 * block
    if zero_stage(recipe) == 3:
        resident = max(resident, min(ZERO_LIVE_ELEMENTS, shape.parameters) * width)
    return float(resident + (root + block if recipe.method == "full" else 0))


def build_forward_pass(recipe: Recipe, shape: Architecture) -> ForwardPass:
    """What autograd keeps. With autocast, norms and sums stay in float32: all is reckoned so, which is an upper bound."""
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
