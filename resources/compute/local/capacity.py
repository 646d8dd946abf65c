"""Job slots and GPUs of this machine, and the types of its GPUs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from recipes.contracts.job import Job, Program
from resources.settings.scheduler import Scheduler

# The GPUs of this machine, which local jobs run on, under the specification's names of GPU types (row V5).


def installed_gpus() -> list[str]:
    """The model of each GPU as its driver names it; none where there is no driver."""
    # Loading the driver's library takes time that a machine without one need not spend before it is asked.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def count_by_type(models: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """How many there are of each known type, none included, and of each other model under its own name."""
    counts = Counter(match_gpu_type(model, known) for model in models)
    return {**dict.fromkeys(known, 0), **counts}


def match_gpu_type(model: str, known: Sequence[str]) -> str:
    """`NVIDIA A100-SXM4-80GB` as `nvidia-a100-80gb`: the type whose every word the model's name has."""
    words = re.findall(r"[a-z0-9]+", model.lower())
    fitting = [name for name in known if set(name.lower().split("-")) <= set(words)]
    return max(fitting, key=len) if fitting else "-".join(words)


def common_gpu_type(models: Iterable[str], known: Sequence[str]) -> str | None:
    """The type of all these models; None where they differ, or there are none."""
    types = {match_gpu_type(model, known) for model in models}
    return types.pop() if len(types) == 1 else None


def free_gpus(total: Mapping[str, int], allocated: Mapping[str, float]) -> dict[str, float]:
    """What running jobs have not asked for. A job may ask for more than there is: it waits, and nothing is free."""
    return {name: max(0.0, count - allocated.get(name, 0.0)) for name, count in total.items()}


GPU_POOL = "gpu"
"""Dagster's pool of all assets that train or evaluate: at most `max_running_jobs` of them are followed at the same time."""
GPU_PROGRAMS = frozenset({Program.TRAIN, Program.EVALUATE, Program.COMMAND})
"""Programs that need a slot, and GPUs where the machine has any."""


def gpu_names(scheduler: Scheduler) -> tuple[str, ...] | None:
    """GPUs that jobs may use: those in the settings, else all of this machine; None where no GPU is known."""
    return tuple(map(str, range(len(installed_gpus())))) or None if scheduler.devices is None else scheduler.devices


def max_running_jobs(scheduler: Scheduler) -> int:
    """How many jobs may train or evaluate on this machine at the same time."""
    return min(scheduler.jobs_at_once or len(gpu_names(scheduler) or "1"), scheduler.max_concurrent_jobs)


def gpus_for(job: Job, names: tuple[str, ...] | None) -> int:
    """How many GPUs a job gets: at least one where there are any, at most all."""
    if job.program not in GPU_PROGRAMS or not names:
        return 0
    requested = job.distributed.gpus_per_node if job.distributed else job.hardware.gpus
    return min(max(requested, 1), len(names))
