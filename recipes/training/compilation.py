"""Blocks of the model as compiled programs: what lies between the matrix products is computed in one pass over memory.

Compiled is one block, for all are alike (`torch.compile` for each is what torchtitan does): some seconds at the start of a
run, and less where the job's cache has it. The same shapes give the same program on each start, or a run that is resumed
were another one.
"""

import os
import shutil
from pathlib import Path

import torch
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from recipes.runner import say

PROGRAMS = 64
"""Of one block, at most: for micro-batches of each size, in training and in evaluation."""
C_COMPILERS = ("gcc", "clang")
"""One of which Triton calls."""


def compile_blocks(model: PreTrainedModel, cache: Path) -> None:
    """Compile each when it is first called. Without a GPU, or a C compiler, they stay as they are."""
    if not torch.cuda.is_available() or not has_triton():
        return
    if not any(map(shutil.which, C_COMPILERS)):
        say(f"there is no C compiler ({' or '.join(C_COMPILERS)}): blocks are not compiled, and a step takes longer")
        return
    say("blocks are compiled for the GPU: the first step takes longer")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    torch._dynamo.config.recompile_limit = PROGRAMS
    torch._inductor.config.deterministic = True  # else it chooses kernels by their time, which is another on each start
    torch._inductor.config.compile_threads = 1  # else processes of half a GB each, for every core
    for block in model.get_decoder().layers:
        block.compile(dynamic=False)  # a shape has its own program, whichever was compiled before
