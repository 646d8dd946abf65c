"""GPU types by the specification's names, parsed from driver names."""

import pytest

from resources.compute.local.capacity import count_by_type, free_gpus, installed_gpus, match_gpu_type
from resources.settings.scheduler import Scheduler

KNOWN = Scheduler().gpu_types


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "nvidia-a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("NVIDIA H200", "nvidia-h200"),
    ],
)
def test_gpu_model_is_matched_to_its_type_in_the_settings(model: str, name: str) -> None:
    assert match_gpu_type(model, KNOWN) == name


def test_every_known_gpu_type_is_counted_even_when_absent() -> None:
    assert count_by_type([], KNOWN) == dict.fromkeys(KNOWN, 0)
    assert count_by_type(["NVIDIA H100 80GB HBM3"] * 8 + ["Tesla T4"], KNOWN)["nvidia-h100-80gb"] == 8
    assert count_by_type(["Tesla T4"], KNOWN)["tesla-t4"] == 1


def test_gpus_of_running_jobs_are_not_free() -> None:
    assert free_gpus({"a": 8, "b": 1, "c": 0}, {"a": 3.0, "b": 2.0}) == {"a": 5.0, "b": 0.0, "c": 0.0}


def test_installed_gpus_of_this_machine_have_a_type() -> None:
    assert all(match_gpu_type(model, KNOWN) for model in installed_gpus())
