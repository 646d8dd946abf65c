"""What a recipe may assume of a GPU: how much memory a program finds on it, and how fast it multiplies.

Sources: NVIDIA's data sheets (dense BF16 with Tensor Cores, no sparsity), and what CUDA reports as total memory, which is a
little less than the name says.
"""

import re
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class GpuSpec:
    """`memory` in bytes as CUDA reports it; `flops` in floating-point operations of bfloat16 a second."""

    memory: float
    flops: float


FLASH_ATTENTION_HEAD_SIZES = range(8, 193, 8)
"""Sizes of heads that FlashAttention computes forwards and backwards on every GPU that it runs on."""

GPU_SPECS = {
    "nvidia-a100-40gb": GpuSpec(39.4 * GIB, 312e12),
    "nvidia-a100-80gb": GpuSpec(79.2 * GIB, 312e12),
    "nvidia-h100-80gb": GpuSpec(79.1 * GIB, 989e12),
    "nvidia-h200-141gb": GpuSpec(139.8 * GIB, 989e12),
}


DEVICE_PEAK_FLOPS = {"A100": 312e12, "H100 PCIE": 756e12, "NVL": 835e12, "H100": 989e12, "H200": 989e12}
"""Operations of bfloat16 a second by a part of the name that CUDA gives a device; the first part that it has counts, for
slower cards of a type say so in theirs.
"""


def find_device_peak(name: str) -> float | None:
    """Of the device that CUDA names so ("NVIDIA H100 PCIe"); none of one that is not in the table, or of a part of one."""
    words = name.upper()
    if "MIG" in words or not any(known in words for known in ("A100", "H100", "H200")):
        return None
    return next(peak for part, peak in DEVICE_PEAK_FLOPS.items() if part in words)


def find_gpu(gpu_type: str | None) -> GpuSpec | None:
    """What is known of a type; none of one that is not in the table."""
    return GPU_SPECS.get(gpu_type or "")


@dataclass(frozen=True)
class GpuRequirement:
    """The specification's `gpu_requirement`: how many GPUs in all, and of which type."""

    gpus: int
    gpu_type: str


def parse_gpu_requirement(text: str) -> GpuRequirement:
    """`"8x A100 80GB"` -> 8 of `nvidia-a100-80gb`. Raises ValueError on another form."""
    match = re.fullmatch(r"([1-9][0-9]*)x ([A-Z][0-9]+) ([0-9]+)GB", text)
    if match is None:
        raise ValueError("write it as '8x A100 80GB'")
    return GpuRequirement(int(match[1]), f"nvidia-{match[2].lower()}-{match[3]}gb")
