"""Choose the optimizer and learning-rate schedule; keep paged moments paged after a resume."""

from typing import Any

import torch

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
