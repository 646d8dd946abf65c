"""On what a run ran, told of it as tags (row E8): processor, GPUs, versions."""

from recipes.contracts.job import Machine


def machine_tags(machine: Machine | None) -> list[tuple[str, str]]:
    """Nothing of a machine that did not say what it is."""
    if machine is None:
        return []
    gpus = {"gpus": ", ".join(machine.gpus)} if machine.gpus else {}
    tags = {"python": machine.python, "processor": machine.processor, **gpus, **machine.packages}
    return [(f"environment/{key}", value) for key, value in tags.items()]
