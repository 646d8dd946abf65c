"""What autograd keeps of a forward pass until the backward pass, in bytes.

Counted from what each operation of `modeling_llama.py` (transformers 5) and of PEFT's LoRA layer saves; equal to what
`torch.autograd.graph.saved_tensors_hooks` sees, which a test asks. The coarser rule of Korthikanti et al. 2022 ("Reducing
activation recomputation", table 2) is for GPT with materialized attention; here attention is fused, and what is kept of size
sequence x sequence is the mask of packed rows, once in each block.
"""

from dataclasses import dataclass

from recipes.planning.architecture import HEAD_NORM_FAMILIES, Architecture

FLOAT32_BYTES = 4
SHARED_INPUT_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Projections that read the same tensor."""


@dataclass(frozen=True)
class ForwardPass:
    """What decides the size of a forward pass.

    A micro-batch is `rows` packed rows of `length` tokens; `width` is the bytes of the computing type; `rank` and `targets`
    are the adapter's, none of them where all weights are trained; `adapter` is the bytes of the type that it computes in.
    Blocks that are `compiled` compute again what lies between matrix products; attention is `masked` where it reads a mask.
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
    """Kept by one block, when nothing is recomputed."""
    shape, width = forward.architecture, forward.width
    # Queries, keys and values as attention reads them, its result, its mask, and a logarithm for each head in float32.
    # Beside a mask, keys and values are repeated for each query head (`repeat_kv`).
    read = 4 * shape.query_width + forward.length if forward.masked else 2 * (shape.query_width + shape.key_value_width)
    attention = width * read + FLOAT32_BYTES * shape.num_attention_heads
    # silu(gate) * up: the argument and both factors, of which one is computed again where that is compiled.
    gated = width * (2 if forward.compiled else 3) * shape.intermediate_size
    norms = 2 * norm_bytes(forward, shape.hidden_size, compiled=forward.compiled) + head_norm_bytes(forward)
    return forward.tokens * (norms + attention + gated + projection_input_bytes(forward))


def norm_bytes(forward: ForwardPass, size: int, *, compiled: bool = False) -> int:
    """RMS norm of one token: what came in and one factor, in float32; its result too where the norm's weight is trained.

    Compiled it keeps what came in as it came, and computes the result again.
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
    """What the projections keep of what they read, for one token.

    A frozen weight needs no input. An adapter reads a copy of its own, where it computes in more than the model does;
    compiled, those that read the same share it. Dropout makes one for each target, and a mask, which is of the same type on
    a CPU and a byte on a GPU: the larger is counted, but for what is compiled.
    """
    shape, width = forward.architecture, forward.width
    sizes = {name: into for name, (into, _) in shape.projections.items()}
    # What `o_proj` reads is attention's result, which is counted there.
    own = [group for group in SHARED_INPUT_PROJECTIONS if group != ("o_proj",)]
    if forward.trains_all:
        return width * sum(sizes[group[0]] for group in own)
    low_rank = forward.adapter * forward.rank * len(forward.targets)
    if forward.dropout:
        mask = 1 if forward.compiled else forward.adapter
        return low_rank + sum((forward.adapter + mask) * sizes[target] for target in forward.targets)
    if width < forward.adapter and not forward.compiled:
        return low_rank + forward.adapter * sum(sizes[target] for target in forward.targets)
    # A copy of attention's result is a tensor of its own.
    read = [
        group
        for group in (own if width == forward.adapter else SHARED_INPUT_PROJECTIONS)
        if set(group) & set(forward.targets)
    ]
    return low_rank + forward.adapter * sum(sizes[group[0]] for group in read)


def saved_activation_bytes(forward: ForwardPass) -> int:
    """Kept of a whole forward pass with its loss.

    With checkpointing only what enters each block is kept (Chen et al. 2016), and one block at a time is computed again:
    that one is in `temporary_bytes`. What the first block computes before its first adapter is not kept, and is counted all
    the same: one part of one block.
    """
    shape, tokens, width = forward.architecture, forward.tokens, forward.width
    block = tokens * width * shape.hidden_size if forward.checkpointing else block_bytes(forward)
    kept = shape.num_hidden_layers * block
    kept += tokens * norm_bytes(forward, shape.hidden_size)
    kept += 2 * width * forward.length * shape.head_size  # sines and cosines of the positions
    if forward.trains_all:
        kept += tokens * width * shape.hidden_size  # what the head reads
    return kept + tokens * width * shape.vocab_size  # logits (`recipes.training.token_loss`)


def temporary_bytes(forward: ForwardPass) -> int:
    """Needed beside what is kept, at the worst moment.

    Either around the loss, for the gradient of the logits, or within the block that is computed again, whose largest tensors
    have a gradient each.
    """
    shape, tokens, width = forward.architecture, forward.tokens, forward.width
    logits = tokens * width * shape.vocab_size
    gradients = tokens * width * 3 * shape.intermediate_size
    again = block_bytes(forward) if forward.checkpointing else 0
    # By then they have been given back.
    return max(logits, again + gradients - logits)
