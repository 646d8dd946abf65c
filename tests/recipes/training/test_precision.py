"""The compute dtype is one that the CPU has instructions for."""

import pytest
import torch

from recipes.training import precision
from recipes.training.precision import cpu_supports_dtype, log_dtype_fallback, select_compute_device, select_compute_dtype

OLD = "processor : 0\nflags\t\t: fpu sse4_2 avx avx2 fma\n"
NEW = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n"
ARM = "processor : 0\nFeatures\t: fp asimd fphp asimdhp bf16\n"


@pytest.mark.parametrize(
    ("wanted", "cpuinfo", "has"),
    [
        ("bfloat16", OLD, False),
        ("bfloat16", NEW, True),
        ("bfloat16", ARM, True),
        ("bfloat16", "", False),
        ("float16", NEW, False),
        ("float16", ARM, True),
        ("float32", OLD, True),
        ("float32", "", True),
    ],
)
def test_cpu_dtype_support_is_read_from_cpuinfo(wanted: str, cpuinfo: str, has: bool) -> None:
    assert cpu_supports_dtype(wanted, cpuinfo) is has


def test_unsupported_cpu_dtype_falls_back_to_float32_with_a_log_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "cpu_supports_dtype", lambda wanted, cpuinfo: wanted == "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_compute_dtype("bfloat16") is torch.float32
    log_dtype_fallback("bfloat16")
    assert "no instructions for bfloat16" in capsys.readouterr().out
    assert select_compute_dtype("float32") is torch.float32


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_compute_dtype_depends_on_the_selected_device(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, has_gpu: bool
) -> None:
    """A GPU in the machine adds no instructions to its CPU."""
    monkeypatch.setattr(precision, "cpu_supports_dtype", lambda wanted, cpuinfo: wanted == "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert select_compute_device().type == ("cuda" if has_gpu else "cpu")
    assert select_compute_dtype("bfloat16", torch.device(device)) is dtype
    assert select_compute_dtype("bfloat16") is (torch.bfloat16 if has_gpu else torch.float32)
