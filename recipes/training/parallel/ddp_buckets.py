"""Fix the order of DDP's gradient buckets, so that resumed runs round alike."""

import torch
from torch.nn.parallel import DistributedDataParallel


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Let DDP sort its buckets of gradients now, by the order of the weights from the last to the first.

    It would do so after a process's first step, by the order in which they came. A sum of three or more numbers depends on
    its place in a bucket: who resumed rounded one step otherwise. To have it look for unused weights keeps the buckets as
    they are made, but then every micro-batch copies what the model returns. What goes through here is zero, and leaves
    nothing.
    """
    reducer = model.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    nothing = torch.zeros((), device=trained[0].device)
    for weight in trained:
        nothing = nothing + weight.flatten()[0] * 0
    nothing.backward()  # type: ignore[no-untyped-call]
    reducer._rebuild_buckets()
    model.zero_grad()
