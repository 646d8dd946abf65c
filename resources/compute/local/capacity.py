"""Job slots and GPUs of this machine, and the types of its GPUs."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from recipes.contracts.job import Job, Program
from resources.settings.scheduler import Scheduler

# GPU types have the names of the specification, such as `nvidia-a100-80gb`.


def installed_gpus() -> list[str]:
    """Return the model name of each GPU from the driver; empty without a driver."""
    # Imported lazily: loading the driver's library takes time.
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
    """Count GPUs by known type, zeros included, and other models by their own name."""
    counts = Counter(match_gpu_type(model, known) for model in models)
    return {**dict.fromkeys(known, 0), **counts}


def match_gpu_type(model: str, known: Sequence[str]) -> str:
    """Return the longest known type whose words all occur in the model name.

    `NVIDIA A100-SXM4-80GB` is `nvidia-a100-80gb`.
    """
    words = re.findall(r"[a-z0-9]+", model.lower())
    fitting = [name for name in known if set(name.lower().split("-")) <= set(words)]
    return max(fitting, key=len) if fitting else "-".join(words)


def common_gpu_type(models: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the common type of all models; None if they differ or there are none."""
    types = {match_gpu_type(model, known) for model in models}
    return types.pop() if len(types) == 1 else None


def free_gpus(total: Mapping[str, int], allocated: Mapping[str, float]) -> dict[str, float]:
    """Return the GPUs that running jobs have not requested, at least 0 per type.

    Requests may exceed the capacity; such jobs wait.
    """
    return {name: max(0.0, count - allocated.get(name, 0.0)) for name, count in total.items()}


GPU_POOL = "gpu"
"""Dagster's pool of all assets that train or evaluate, limited to `max_running_jobs`."""
GPU_PROGRAMS = frozenset({Program.TRAIN, Program.EVALUATE, Program.COMMAND})
"""Programs that need a slot, and GPUs if the machine has any."""


def gpu_names(scheduler: Scheduler) -> tuple[str, ...] | None:
    """Return the GPUs that jobs may use: the configured ones, else all.

    None if no GPU is known.
    """
    return tuple(map(str, range(len(installed_gpus())))) or None if scheduler.devices is None else scheduler.devices


def max_running_jobs(scheduler: Scheduler) -> int:
    """Return how many jobs may train or evaluate concurrently here."""
    return min(scheduler.jobs_at_once or len(gpu_names(scheduler) or "1"), scheduler.max_concurrent_jobs)


def gpus_for(job: Job, names: tuple[str, ...] | None) -> int:
    """Return a job's GPU count: at least one if any exist, at most all."""
    if job.program not in GPU_PROGRAMS or not names:
        return 0
    requested = job.distributed.gpus_per_node if job.distributed else job.hardware.gpus
    return min(max(requested, 1), len(names))
