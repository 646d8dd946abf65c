"""On what a program computes: read in the program's own process, since nobody else is there."""

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
"""The packages that compute a model, or decide what is computed."""
CPUINFO = Path("/proc/cpuinfo")
NVIDIA_FOLDER = Path("/proc/driver/nvidia/gpus")


def read_machine() -> Machine:
    """This process's machine. The threads are torch's where the program has loaded it, else one for each processor."""
    torch = sys.modules.get("torch")
    return Machine(
        python=platform.python_version(),
        packages={name: found for name in COMPUTING_PACKAGES if (found := installed_version(name))},
        processor=parse_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""),
        gpus=tuple(parse_gpu(path.read_text(encoding="utf-8")) for path in sorted(NVIDIA_FOLDER.glob("*/information"))),
        threads=torch.get_num_threads() if torch else os.cpu_count() or 1,
    )


def usable_cores(requested: int | None) -> int:
    """As many of this machine's cores as a job asked for, of none or 0 all. A job that asked for 9,999 got as many threads
    on each core that there was, and an hour's work of everybody else stood still.
    """
    available = os.cpu_count() or 1
    return min(requested or available, available)


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def parse_processor(cpuinfo: str) -> str:
    """The name that the kernel gives; on ARM, which has none there, the architecture."""
    return parse_field(cpuinfo, "model name") or platform.machine()


def parse_gpu(information: str) -> str:
    return parse_field(information, "Model") or "unknown GPU"


def parse_field(text: str, name: str) -> str:
    """The value of the first line `NAME : VALUE`; empty where there is none."""
    lines = (line.partition(":") for line in text.splitlines())
    return next((" ".join(value.split()) for key, _, value in lines if key.strip() == name), "")
