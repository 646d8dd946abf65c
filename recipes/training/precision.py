"""In which type a model computes on this machine: the recipe's, or float32 where a processor has no instructions for it.

A processor without them computes bfloat16 by conversion: a step of 135 million parameters took 120 s. The base model's
weights are the same numbers in both; what is stored and served stays in the recipe's type.
"""

from pathlib import Path

import torch

from recipes.runner import log_line

REQUIRED_CPU_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fphp"},
    "float32": None,
}
"""Flags of /proc/cpuinfo, of x86 and of ARM, one of which a type needs; float32 needs none."""
CPUINFO = Path("/proc/cpuinfo")


def select_compute_device() -> torch.device:
    """Where a model computes on this machine: on its GPU, if it has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def select_compute_dtype(dtype_name: str, device: torch.device | None = None) -> torch.dtype:
    """The type to compute in where a recipe wants that one; on that device, or on this machine's."""
    found: torch.dtype = getattr(torch, dtype_name)
    on_gpu = (device or select_compute_device()).type == "cuda"
    is_supported = on_gpu or cpu_supports_dtype(dtype_name, CPUINFO.read_text() if CPUINFO.is_file() else "")
    return found if is_supported else torch.float32


def log_dtype_fallback(dtype_name: str) -> None:
    """Say so where a recipe's type is not the one that is computed in."""
    if select_compute_dtype(dtype_name) is not getattr(torch, dtype_name):
        log_line(f"this processor has no instructions for {dtype_name}: computing in float32")


def cpu_supports_dtype(dtype_name: str, cpuinfo: str) -> bool:
    """Whether a processor has instructions for a type, by what the kernel says of it."""
    needed = REQUIRED_CPU_FLAGS[dtype_name]
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return needed is None or bool(needed & flags)
