"""Memory and peak throughput of known GPUs.

Sources: NVIDIA's data sheets (dense BF16 with Tensor Cores, no sparsity), and the total memory that CUDA reports, which is a
little less than the name says.
"""

import re
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True)
class GpuSpec:
    """`memory` in bytes as reported by CUDA; `flops` in bfloat16 FLOP/s."""

    memory: float
    flops: float


FLASH_ATTENTION_HEAD_SIZES = range(8, 193, 8)
"""Head sizes for which FlashAttention supports forward and backward passes on all its GPUs."""

GPU_SPECS = {
    "nvidia-a100-40gb": GpuSpec(39.4 * GIB, 312e12),
    "nvidia-a100-80gb": GpuSpec(79.2 * GIB, 312e12),
    "nvidia-h100-80gb": GpuSpec(79.1 * GIB, 989e12),
    "nvidia-h200-141gb": GpuSpec(139.8 * GIB, 989e12),
}


DEVICE_PEAK_FLOPS = {"A100": 312e12, "H100 PCIE": 756e12, "NVL": 835e12, "H100": 989e12, "H200": 989e12}
"""Peak bfloat16 FLOP/s by part of CUDA's device name. The first matching part counts, because names of slower variants are
more specific.
"""


def find_device_peak(name: str) -> float | None:
    """Return the peak of a device by CUDA's name ("NVIDIA H100 PCIe").

    None if unknown or a MIG slice.
    """
    words = name.upper()
    if "MIG" in words or not any(known in words for known in ("A100", "H100", "H200")):
        return None
    return next(peak for part, peak in DEVICE_PEAK_FLOPS.items() if part in words)


def find_gpu(gpu_type: str | None) -> GpuSpec | None:
    """Return the specification of a GPU type, or None if unknown."""
    return GPU_SPECS.get(gpu_type or "")


@dataclass(frozen=True)
class GpuRequirement:
    """The specification's `gpu_requirement`: total number of GPUs, and their type."""

    gpus: int
    gpu_type: str


def parse_gpu_requirement(text: str) -> GpuRequirement:
    """Parse `"8x A100 80GB"` to 8 of `nvidia-a100-80gb`. Raises ValueError."""
    match = re.fullmatch(r"([1-9][0-9]*)x ([A-Z][0-9]+) ([0-9]+)GB", text)
    if match is None:
        raise ValueError("write it as '8x A100 80GB'")
    return GpuRequirement(int(match[1]), f"nvidia-{match[2].lower()}-{match[3]}gb")
