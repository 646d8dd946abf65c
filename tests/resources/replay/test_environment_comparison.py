"""Comparison of two environments: every property that may change a number, under its common name."""

from pathlib import Path

import pytest

from recipes import machine
from recipes.contracts.job import Machine
from recipes.machine import parse_gpu, parse_processor, read_machine
from resources.lineage.run_record import Environment
from resources.replay.comparison import Difference, environment_differences

CODE = Environment(git_commit="c1", git_dirty=False, lock_sha256="1" * 64, python="3.11.7")
MACHINE = Machine(python="3.11.7", packages={"torch": "2.13.0", "peft": "0.21.2"}, processor="EPYC", threads=2)


def differences(code: Environment, machine: Machine | None, *, threads: bool = True) -> dict[str, tuple[str, str]]:
    found = environment_differences(CODE, MACHINE, code, machine, threads=threads)
    return {difference.what: (difference.then, difference.now) for difference in found}


def test_equal_environments_have_no_difference() -> None:
    assert differences(CODE, MACHINE) == {}


def test_changed_code_and_lock_are_reported() -> None:
    changed = CODE.model_copy(update={"git_commit": "c2", "git_dirty": True, "git_diff_sha256": "f" * 64})
    assert differences(changed.model_copy(update={"lock_sha256": "2" * 64}), MACHINE) == {
        "git commit": ("c1", "c2"),
        "uncommitted changes": ("no", "yes, SHA-256 ffffffffffff"),
        "requirements.lock": ("SHA-256 111111111111", "SHA-256 222222222222"),
    }


def test_equal_changes_are_equal_code() -> None:
    dirty = CODE.model_copy(update={"git_dirty": True, "git_diff_sha256": "f" * 64})
    assert environment_differences(dirty, MACHINE, dirty, MACHINE) == ()


def test_changed_machine_is_reported() -> None:
    other = Machine(python="3.11.7", packages={"torch": "2.14.0"}, processor="Xeon", gpus=("H100", "H100"), threads=8)
    expected = {
        "torch": ("2.13.0", "2.14.0"),
        "peft": ("0.21.2", "none"),
        "processor": ("EPYC", "Xeon"),
        "GPUs": ("none", "H100, H100"),
    }
    assert differences(CODE, other) == {**expected, "threads": ("2", "8")}
    assert differences(CODE, other, threads=False) == expected


def test_unrecorded_machine_is_reported_as_not_recorded() -> None:
    assert Difference(what="torch", then="not recorded", now="2.13.0") in environment_differences(CODE, None, CODE, MACHINE)


def test_machine_is_parsed_from_the_kernel_description() -> None:
    assert parse_processor("processor : 0\nmodel name\t: AMD EPYC  7B13\nflags : sse\n") == "AMD EPYC 7B13"
    assert parse_gpu("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   35\n") == "NVIDIA H100 80GB HBM3"
    found = read_machine()
    assert found.processor and found.threads >= 1 and found.packages["torch"]


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is loaded for it; without a driver there are none."""
    monkeypatch.setattr(machine, "NVIDIA_FOLDER", tmp_path)
    assert read_machine().gpus == ()
    for bus, model in (("0000:0a:00.0", "NVIDIA H200"), ("0000:01:00.0", "NVIDIA A100-SXM4-80GB")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t {model}\nIRQ:   35\n")
    assert read_machine().gpus == ("NVIDIA A100-SXM4-80GB", "NVIDIA H200")
