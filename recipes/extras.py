"""Optional dependencies of the `hanzo-ml` package: find missing ones and name the install command."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, requires

from packaging.requirements import Requirement

PACKAGE = "hanzo-ml"
TRAIN = "train"
"""Extra with PyTorch and dependent packages; each is imported under its own name."""
SERVE = "serve"
"""Extra with the inference engine of a single machine."""


def lacking(what: str, extra: str) -> str | None:
    """Return why `what` cannot run here, with the install command, or None."""
    missing = missing_here(extra)
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return f"{what} needs {', '.join(missing)}, which {verb} not installed here: pip install '{PACKAGE}[{extra}]'"


def failed_import(error: ModuleNotFoundError, what: str) -> str | None:
    """Like `lacking`, for a failed import of a package in the extra `train`.

    None for other modules.
    """
    name = (error.name or "").partition(".")[0]
    return lacking(what, TRAIN) if name in missing_here(TRAIN) else None


def missing_here(extra: str) -> list[str]:
    try:
        return missing_packages(requires(PACKAGE) or (), extra)
    except PackageNotFoundError:  # modules without package metadata, as in a user's own image
        return []


def missing_packages(requirements: Iterable[str], extra: str) -> list[str]:
    """Return packages that only `extra` requires and that are not installed in any version."""
    found = map(Requirement, requirements)
    wanted = [each.name for each in found if each.marker and each.marker.evaluate({"extra": extra})]
    return [name for name in wanted if not is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
