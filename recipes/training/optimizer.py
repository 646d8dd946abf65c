"""Choose the optimizer and learning-rate schedule; keep paged moments paged after a resume."""

from typing import Any

import torch

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"}
"""The recipe's names in transformers; all but the first are those of bitsandbytes."""

LR_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
"""Likewise, of what becomes of the learning rate: to 0 at the last step, or as it is."""

PAGED_MOMENTS = ("state1", "state2")
"""What AdamW keeps of each weight, by bitsandbytes' names."""


@torch.no_grad()
def restore_paged_moments(optimizer: Any) -> None:
    """After an optimizer's state was loaded: bitsandbytes 0.50 loads all of it onto the GPU, where it then stays.

    It has room of its own for each weight's moments, which is paged for large ones alone.
    """
    if not getattr(optimizer, "is_paged", False):
        return
    for weight, state in optimizer.state.items():
        for key in PAGED_MOMENTS:
            room = optimizer.get_state_buffer(weight, dtype=state[key].dtype)
            state[key] = room.copy_(state[key])
