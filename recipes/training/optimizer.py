"""Moments that a paged optimizer keeps in the host's memory, and that come to a GPU while they are used."""

from typing import Any

import torch

MOMENTS = ("state1", "state2")
"""What AdamW keeps of each weight, by bitsandbytes' names."""


@torch.no_grad()
def page_again(optimizer: Any) -> None:
    """After an optimizer's state was loaded: bitsandbytes 0.50 loads all of it onto the GPU, where it then stays.

    It has room of its own for each weight's moments, which is paged for large ones alone.
    """
    if not getattr(optimizer, "is_paged", False):
        return
    for weight, state in optimizer.state.items():
        for key in MOMENTS:
            room = optimizer.get_state_buffer(weight, dtype=state[key].dtype)
            state[key] = room.copy_(state[key])
