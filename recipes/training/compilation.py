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
"""Of one block, at most: for micro-batches of each size, in training and in evaluation. Beyond, PyTorch compiles no more."""
C_COMPILERS = ("gcc", "clang")
"""One of which Triton calls, with Python's headers."""


def compile_blocks(model: PreTrainedModel, cache: Path) -> None:
    """Compile each when it is first called. Without a GPU, or what Triton needs, they stay as they are."""
    if not torch.cuda.is_available() or not has_triton():
        return
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not any(map(shutil.which, C_COMPILERS)) or not headers.is_file():
        log_line(f"blocks are not compiled, and a step takes longer: {' or '.join(C_COMPILERS)}, or {headers}, is not there")
        return
    log_line("blocks are compiled for the GPU: the first step takes longer")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    torch._dynamo.config.recompile_limit = MAX_PROGRAMS_PER_BLOCK
    torch._dynamo.config.optimize_ddp = False  # it cuts programs where buckets of gradients end, and blocks end soon enough
    torch._inductor.config.deterministic = True
    torch._inductor.config.compile_threads = 1  # else processes of half a GB each, for every core
    for block in model.get_decoder().layers:
        block.compile(dynamic=False)


def compile_failure_reason(error: Exception) -> str | None:
    """What a compiler says that it fails at, if that is what went wrong: Triton has faults, and does not know every GPU."""
    if not isinstance(error, TorchDynamoException):
        return None
    cause = getattr(error, "inner_exception", error)
    said = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__


def has_compiled_blocks(model: torch.nn.Module) -> bool:
    """Whether any part of a model is, or will be when it is called."""
    return any(module._compiled_call_impl is not None for module in model.modules())
