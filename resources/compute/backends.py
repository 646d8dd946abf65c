"""Registry of compute backends: each is a sibling folder with a module `backend`.

`scheduler.backend` names the folder. The module is imported on opening, so that a process loads only the backend it uses.
"""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import resources.compute
from recipes.contracts.job import BadConfiguration
from resources.compute.credentials import Credentials, NoCredentials

if TYPE_CHECKING:
    from resources.compute.base import Compute
    from resources.settings.settings import Settings


def backend_names() -> list[str]:
    """Return the sorted names of all backends."""
    folders = (module.name for module in iter_modules(resources.compute.__path__) if module.ispkg)
    return sorted(name for name in folders if find_spec(backend_module(name)))


def backend_module(name: str) -> str:
    return f"{resources.compute.__name__}.{name}.backend"


def check_backend(name: str) -> str:
    """Return the name of a backend unchanged.

    Raises:
        ValueError: there is no such backend; the message lists those that exist.
    """
    names = backend_names()
    if name not in names:
        raise ValueError(f"unknown backend '{name}', available: {', '.join(names)}")
    return name


def open_backend(settings: "Settings", credentials: Credentials | None = None) -> "Compute":
    """Open the configured backend.

    Raises:
        BadConfiguration: there is no such backend; the message lists those that exist.
    """
    try:
        name = check_backend(settings.scheduler.backend)
    except ValueError as problem:
        raise BadConfiguration(f"scheduler.backend: {problem}") from None
    backend: Compute = import_module(backend_module(name)).open_backend(settings, credentials or NoCredentials())
    return backend
