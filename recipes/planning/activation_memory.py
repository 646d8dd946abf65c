"""Estimate the bytes that autograd stores in a forward pass for the backward pass.

Counted from what each operation of `modeling_llama.py` (transformers 5) and of PEFT's LoRA layer saves, and verified by a
test with `torch.autograd.graph.saved_tensors_hooks`. The coarser rule of Korthikanti et al. 2022 ("Reducing activation
recomputation", table 2) applies to GPT with materialized attention; here attention is fused, and the only stored tensor of
size sequence x sequence is the mask of packed rows, once per block.
"""

from dataclasses import dataclass

from recipes.planning.architecture import HEAD_NORM_FAMILIES, Architecture

FLOAT32_BYTES = 4
SHARED_INPUT_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Groups of projections that read the same tensor."""


@dataclass(frozen=True)
class ForwardPass:
    """Parameters that determine the size of a forward pass.

    Attributes:
        rows: packed rows in a micro-batch.
        length: tokens per row.
        width: bytes per element of the compute dtype.
        rank, targets: of the adapter; unset if all weights are trained.
        adapter: bytes per element of the adapter's compute dtype.
        compiled: blocks are compiled and recompute what is between matrix products.
        masked: attention reads a mask.
    """

    architecture: Architecture
    rows: int
    length: int
    width: int
    rank: int = 0
    targets: tuple[str, ...] = ()
    dropout: bool = False
    checkpointing: bool = False
    adapter: int = FLOAT32_BYTES
    compiled: bool = False
    masked: bool = True

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def trains_all(self) -> bool:
        return not self.targets


def block_bytes(forward: ForwardPass) -> int:
    """Return the bytes stored by one block without recomputation."""
    shape, width = forward.architecture, forward.width
    # Queries, keys and values as attention reads them, its output, its mask, and one float32 logarithm per head. With a
    # mask, keys and values are repeated for each query head (`repeat_kv`).
    read = 4 * shape.query_width + forward.length if forward.masked else 2 * (shape.query_width + shape.key_value_width)
    attention = width * read + FLOAT32_BYTES * shape.num_attention_heads
    # silu(gate) * up: the argument and both factors, of which compiled blocks recompute one.
    gated = width * (2 if forward.compiled else 3) * shape.intermediate_size
    norms = 2 * norm_bytes(forward, shape.hidden_size, compiled=forward.compiled) + head_norm_bytes(forward)
    return forward.tokens * (norms + attention + gated + projection_input_bytes(forward))


def norm_bytes(forward: ForwardPass, size: int, *, compiled: bool = False) -> int:
    """Return the bytes stored by an RMS norm per token.

    The input and a factor in float32; the output too if the norm's weight is trained. A compiled norm stores the input in
    its own dtype, and recomputes the output.
    """
    if compiled:
        return forward.width * size + FLOAT32_BYTES
    return FLOAT32_BYTES * size + FLOAT32_BYTES + (forward.width * size if forward.trains_all else 0)


def head_norm_bytes(forward: ForwardPass) -> int:
    shape = forward.architecture
    if shape.model_type not in HEAD_NORM_FAMILIES:
        return 0
    heads = shape.num_attention_heads + shape.num_key_value_heads
    return heads * norm_bytes(forward, shape.head_size, compiled=forward.compiled)


def projection_input_bytes(forward: ForwardPass) -> int:
    """Return the bytes per token that projections store of their inputs.

    A frozen weight needs no input. An adapter with a wider compute dtype than the model's stores a copy; compiled adapters
    of the same input share it. Dropout stores a copy per target, and a mask, which has the same dtype on a CPU and is one
    byte on a GPU: the larger is counted, except for compiled blocks.
    """
    shape, width = forward.architecture, forward.width
    sizes = {name: into for name, (into, _) in shape.projections.items()}
    # The input of `o_proj` is attention's output, which is counted there.
    own = [group for group in SHARED_INPUT_PROJECTIONS if group != ("o_proj",)]
    if forward.trains_all:
        return width * sum(sizes[group[0]] for group in own)
    low_rank = forward.adapter * forward.rank * len(forward.targets)
    if forward.dropout:
        mask = 1 if forward.compiled else forward.adapter
        return low_rank + sum((forward.adapter + mask) * sizes[target] for target in forward.targets)
    if width < forward.adapter and not forward.compiled:
        return low_rank + forward.adapter * sum(sizes[target] for target in forward.targets)
    # A converted copy of attention's output is a separate tensor.
    read = [
        group
        for group in (own if width == forward.adapter else SHARED_INPUT_PROJECTIONS)
        if set(group) & set(forward.targets)
    ]
    return low_rank + forward.adapter * sum(sizes[group[0]] for group in read)


def saved_activation_bytes(forward: ForwardPass) -> int:
    """Return the bytes stored by a whole forward pass with its loss.

    With checkpointing only the input of each block is stored (Chen et al. 2016), and one block at a time is recomputed,
    which is in `temporary_bytes`. What the first block computes before its first adapter is not stored, but is counted: a
    part of one block.
    """
    shape, tokens, width = forward.architecture, forward.tokens, forward.width
    block = tokens * width * shape.hidden_size if forward.checkpointing else block_bytes(forward)
    kept = shape.num_hidden_layers * block
    kept += tokens * norm_bytes(forward, shape.hidden_size)
    kept += 2 * width * forward.length * shape.head_size  # sines and cosines of the positions
    if forward.trains_all:
        kept += tokens * width * shape.hidden_size  # the head's input
    return kept + tokens * width * shape.vocab_size  # logits (`recipes.training.token_loss`)


def temporary_bytes(forward: ForwardPass) -> int:
    """Return the additional bytes needed at the worst moment.

    That is either at the loss, for the gradient of the logits, or in the recomputed block, whose largest tensors have a
    gradient each.
    """
    shape, tokens, width = forward.architecture, forward.tokens, forward.width
    logits = tokens * width * shape.vocab_size
    gradients = tokens * width * 3 * shape.intermediate_size
    again = block_bytes(forward) if forward.checkpointing else 0
    # The logits are freed by then.
    return max(logits, again + gradients - logits)
