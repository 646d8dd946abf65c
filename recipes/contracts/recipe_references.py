"""References in a recipe: objective, pinned base model and container image."""

import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pydantic import Field, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.storage import uris

# Built-in and installed objectives, and which of them learn from pairs; free of torch.

OBJECTIVES_GROUP = "hanzo_ml.objectives"
"""Entry point group of objectives installed by an operator (`recipes.training.objectives`)."""
PAIR_OBJECTIVES_GROUP = "hanzo_ml.objectives.pairs"
"""Entry point group of objectives that learn from pairs, of which both answers pass through the model. Memory and tokens are
estimated where torch is not installed, so the class itself cannot be imported to find out.
"""
PREFERENCE_OBJECTIVES = ("dpo", "orpo")
BUILT_IN_OBJECTIVES = ("sft", *PREFERENCE_OBJECTIVES)


@cache  # the lookup takes 14 ms, and a sweep has a thousand recipes
def learns_from_pairs(objective: str) -> bool:
    """Return whether an objective, built in or installed, learns from pairs."""
    if objective in BUILT_IN_OBJECTIVES:
        return objective in PREFERENCE_OBJECTIVES
    return objective in entry_points(group=PAIR_OBJECTIVES_GROUP).names


def list_installed_objectives() -> list[str]:
    """Return the names of installed objectives that are not built in."""
    return sorted(entry_points(group=OBJECTIVES_GROUP).names | entry_points(group=PAIR_OBJECTIVES_GROUP).names)


def require_known_objective(name: str) -> str:
    """Return the name. Raises ValueError with the available names if it is unknown."""
    if name in BUILT_IN_OBJECTIVES:  # the lookup of others takes 14 ms, for each of the thousand recipes of a sweep
        return name
    installed = list_installed_objectives()
    if name not in installed:
        raise ValueError(f"unknown objective: use {', '.join([*BUILT_IN_OBJECTIVES, *installed])}")
    return name


# The container image of a recipe's pods, pinned by a digest, or by the tag of a commit or a release.

IMAGE_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*(?::(?P<tag>\w[\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def require_pinned_image(image: str) -> str:
    """Return the image. Raises ValueError if it is no image reference or not pinned."""
    found = IMAGE_REFERENCE.fullmatch(image)
    if found is None:
        raise ValueError(f"{image[:200]!r} is not an image: write REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise ValueError(f"{image!r} may change at any time: use the tag of a commit or release, or a digest")
    return image


# The base model that a recipe starts from. Resolved to files in `recipes.export.base_model`.

PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?(==[\w.!+]+)?", re.ASCII)


class BaseModelRef(FrozenModel):
    """A base model, pinned by the SHA-256 of its file or folder manifest.

    A name alone, such as `zenlm/zen-7b`, is a model whose files are not available yet: such a recipe can be planned, and
    trained once it is pinned.
    """

    uri: str = Field(
        min_length=1, description="pypi://PACKAGE, file:///FOLDER, or the name of a model that is not pinned yet"
    )
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    @field_validator("uri")
    @classmethod
    def validate_syntax(cls, value: str) -> str:
        """Raise ValueError for malformed URIs, such as invalid addresses in brackets."""
        urlparse(value)
        return value

    @property
    def is_folder(self) -> bool:
        """Whether it is a local folder.

        The scheme is case-insensitive: FILE: once bypassed the check that rejects folders.
        """
        return urlparse(self.uri).scheme == "file"

    @property
    def folder(self) -> Path:
        """Path of a model in a local folder."""
        return Path(unquote(urlparse(self.uri).path))

    @property
    def missing_folder_problem(self) -> str | None:
        """Error if the folder holds no model, else None."""
        exists = (self.folder / "config.json").is_file()
        return None if exists else f"unknown base model {self.uri}: no config.json in {self.folder}"

    @property
    def artifact_uri(self) -> str | None:
        """URI of the resolved model in the object store; None if it is not pinned."""
        return uris.base_model(self.sha256) if self.sha256 else None

    @model_validator(mode="before")
    @classmethod
    def accept_plain_name(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @property
    def problem(self) -> str | None:
        """Why the reference cannot be resolved, judged by its syntax alone, or None.

        A pinned model that is in the store already is found by its hash, independent of its name.
        """
        address, shortened = urlparse(self.uri), self.uri[:100]
        if address.scheme == "pypi" and not PACKAGE_NAME.fullmatch(address.netloc):
            return f"unknown base model {shortened}: that is not a package name"
        if address.scheme not in ("pypi", "file", *([] if self.sha256 else [""])):
            return f"unknown base model {shortened}: use pypi://PACKAGE or file:///FOLDER"
        if self.sha256 is None:
            return (
                f"base model {shortened} is not pinned: set base_model to {{uri: file:///FOLDER, sha256: ...}} of its files"
            )
        return None
