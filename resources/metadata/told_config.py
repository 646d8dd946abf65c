"""A job's configuration as others are told it: the values of its variables may be secrets, which its program alone needs.

They stay in the job's own row, so that it can be started and resumed.
"""

from collections.abc import Mapping
from typing import Any

ENV = "env"
MASK = "********"
OPEN = frozenset({"HANZO_ML_EXPERIMENT"})
"""Variables that say what everybody can see of the job's run."""


def told_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the names of its variables alone."""
    env = config.get(ENV)
    if not isinstance(env, Mapping):
        return dict(config)
    return {**config, ENV: {name: value if name in OPEN else MASK for name, value in env.items()}}


def told_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """An event's payload with the configuration as it is told: some were written before it was masked."""
    config = payload.get("config")
    return {**payload, "config": told_config(config)} if isinstance(config, Mapping) else dict(payload)
