"""Optional dependencies of the `hanzo-ml` package: which of them are not installed here, and how to install them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires

from packaging.requirements import Requirement

PACKAGE = "hanzo-ml"
TRAIN = "train"
"""PyTorch and what stands on it: each package of it is imported by its own name."""
SERVE = "serve"
"""What the inference engine of one machine runs with."""


def lacking(what: str, extra: str) -> str | None:
    """Why `what` cannot run here, with the command that changes it; None where it can."""
    missing = missing_here(extra)
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return f"{what} needs {', '.join(missing)}, which {verb} not installed here: pip install '{PACKAGE}[{extra}]'"


def failed_import(error: ModuleNotFoundError, what: str) -> str | None:
    """The same, of an import that found no module of the extra `train`; None where it was another module."""
    name = (error.name or "").partition(".")[0]
    return lacking(what, TRAIN) if name in missing_here(TRAIN) else None


def missing_here(extra: str) -> list[str]:
    try:
        return missing_packages(requires(PACKAGE) or (), extra)
    except PackageNotFoundError:  # modules without their package, as in a user's own image
        return []


def missing_packages(requirements: Iterable[str], extra: str) -> list[str]:
    """Packages that only `extra` requires and that are not installed, in any version."""
    found = map(Requirement, requirements)
    wanted = [each.name for each in found if each.marker and each.marker.evaluate({"extra": extra})]
    return [name for name in wanted if not is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
