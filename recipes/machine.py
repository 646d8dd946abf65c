"""Describe the machine that a program runs on, from its own process."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from recipes.contracts.job import Machine

COMPUTING_PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "numpy",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "trl",
)
"""Packages that compute a model, or affect the result."""
CPUINFO = Path("/proc/cpuinfo")
NVIDIA_FOLDER = Path("/proc/driver/nvidia/gpus")


def read_machine() -> Machine:
    """Describe this machine.

    Threads are torch's if it is loaded, else one per processor.
    """
    torch = sys.modules.get("torch")
    return Machine(
        python=platform.python_version(),
        packages={name: found for name in COMPUTING_PACKAGES if (found := installed_version(name))},
        processor=parse_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""),
        gpus=tuple(parse_gpu(path.read_text(encoding="utf-8")) for path in sorted(NVIDIA_FOLDER.glob("*/information"))),
        threads=torch.get_num_threads() if torch else os.cpu_count() or 1,
    )


def usable_cores(requested: int | None) -> int:
    """Return the number of cores to use.

    The requested ones up to all, or all for None and 0. A job that requested 9,999 once got as many threads on each core,
    and stalled everyone's work for an hour.
    """
    available = os.cpu_count() or 1
    return min(requested or available, available)


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def parse_processor(cpuinfo: str) -> str:
    """Return the processor's name; on ARM, where the kernel reports none, the architecture."""
    return parse_field(cpuinfo, "model name") or platform.machine()


def parse_gpu(information: str) -> str:
    return parse_field(information, "Model") or "unknown GPU"


def parse_field(text: str, name: str) -> str:
    """Return the value of the first line `NAME : VALUE`, or an empty string."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((" ".join(value.split()) for key, _, value in lines if key.strip() == name), "")
