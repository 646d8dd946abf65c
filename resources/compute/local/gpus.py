"""The GPUs of this machine, which local jobs run on, under the specification's names of GPU types (row V5)."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def installed() -> list[str]:
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


def by_type(models: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """How many there are of each known type, none included, and of each other model under its own name."""
    counts = Counter(type_of(model, known) for model in models)
    return {**dict.fromkeys(known, 0), **counts}


def type_of(model: str, known: Sequence[str]) -> str:
    """`NVIDIA A100-SXM4-80GB` as `nvidia-a100-80gb`: the type whose every word the model's name has."""
    words = re.findall(r"[a-z0-9]+", model.lower())
    fitting = [name for name in known if set(name.lower().split("-")) <= set(words)]
    return max(fitting, key=len) if fitting else "-".join(words)


def free(total: Mapping[str, int], allocated: Mapping[str, float]) -> dict[str, float]:
    """What running jobs have not asked for. A job may ask for more than there is: it waits, and nothing is free."""
    return {name: max(0.0, count - allocated.get(name, 0.0)) for name, count in total.items()}
