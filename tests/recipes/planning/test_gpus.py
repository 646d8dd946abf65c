"""GPU peak performance by device name, as CUDA and the driver's files spell it."""

import pytest

from recipes.planning.gpus import find_device_peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H20", None),
    ],
)
def test_device_peak_is_found_by_device_name(name: str, peak: float | None) -> None:
    assert find_device_peak(name) == peak
