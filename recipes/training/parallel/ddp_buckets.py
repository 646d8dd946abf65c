"""Fix the order of DDP's gradient buckets, so that resumed runs round identically."""

import torch
from torch.nn.parallel import DistributedDataParallel


def fix_bucket_order(model: DistributedDataParallel) -> None:
    """Make DDP build its final gradient buckets now, in reverse order of the weights.

    By default DDP rebuilds them after a process's first step, in the order in which gradients arrived. A sum of three or
    more numbers depends on its position in a bucket, so a resumed run rounded its first step differently. Searching for
    unused weights would keep the initial buckets, but copies the model's output in every micro-batch. The backward pass here
    only propagates zeros and leaves no gradients.
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
