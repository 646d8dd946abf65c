"""Choose the optimizer and learning-rate schedule; keep paged moments paged after a resume."""

from typing import Any

import torch

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit"}
"""Recipe names to transformers names; all but the first are implemented by bitsandbytes."""

LR_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
"""Recipe names to transformers names: decay to 0 at the last step, or stay constant, after warmup."""

PAGED_MOMENTS = ("state1", "state2")
"""AdamW's two moments, by bitsandbytes' names."""


@torch.no_grad()
def restore_paged_moments(optimizer: Any) -> None:
    """Move large moments back to paged memory after loading the optimizer's state.

    bitsandbytes 0.50 loads the state onto the GPU, where it then stays. Its own buffers are paged for large weights only.
    """
    if not getattr(optimizer, "is_paged", False):
        return
    for weight, state in optimizer.state.items():
        for key in PAGED_MOMENTS:
            room = optimizer.get_state_buffer(weight, dtype=state[key].dtype)
            state[key] = room.copy_(state[key])
