"""Compile the model's transformer blocks with torch.compile."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from recipes.runner import log_line

MAX_PROGRAMS_PER_BLOCK = 64
"""Maximum compiled programs per block: one per micro-batch shape, in training and in evaluation. Beyond it PyTorch runs
eagerly.
"""
C_COMPILERS = ("gcc", "clang")
"""Triton needs one of these compilers and Python's headers."""


def compile_blocks(model: PreTrainedModel, cache: Path) -> None:
    """Enable lazy compilation of each transformer block; do nothing without a GPU or Triton's prerequisites.

    Args:
        model: its decoder layers are compiled in place, each at its first call.
        cache: directory for the Inductor and Triton caches.
    """
    if not torch.cuda.is_available() or not has_triton():
        return
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not any(map(shutil.which, C_COMPILERS)) or not headers.is_file():
        log_line(f"blocks are not compiled, so steps take longer: need {' or '.join(C_COMPILERS)} on PATH, and {headers}")
        return
    log_line("blocks are compiled for the GPU: the first step takes longer")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    torch._dynamo.config.recompile_limit = MAX_PROGRAMS_PER_BLOCK
    # it splits graphs at gradient buckets; compiling per block splits finely enough
    torch._dynamo.config.optimize_ddp = False
    torch._inductor.config.deterministic = True
    torch._inductor.config.compile_threads = 1  # the default is one process per core, each of half a GB
    for block in model.get_decoder().layers:
        block.compile(dynamic=False)


def compile_failure_reason(error: Exception) -> str | None:
    """Return the compiler's message if `error` is a compile failure, else None.

    Triton has bugs and does not support every GPU, so training must be able to continue without compiled blocks.
    """
    if not isinstance(error, TorchDynamoException):
        return None
    cause = getattr(error, "inner_exception", error)
    said = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__


def has_compiled_blocks(model: torch.nn.Module) -> bool:
    """Return whether any part of the model is or will be compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())
