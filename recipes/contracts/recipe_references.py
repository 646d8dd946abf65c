"""References that a recipe names: objective, pinned base model and container image."""

import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pydantic import Field, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.storage import uris

# Which objectives there are, built in or installed, and which of them learn from pairs; no torch in here.

OBJECTIVES_GROUP = "hanzo_ml.objectives"
"""Entry point group of the objectives that an operator has installed (`recipes.training.objectives`)."""
PAIR_OBJECTIVES_GROUP = "hanzo_ml.objectives.pairs"
"""Of those that learn from pairs, both of whose answers go through the model: memory and tokens are reckoned where no torch
is, which to import the class itself would need. So what installs it says so.
"""
PREFERENCE_OBJECTIVES = ("dpo", "orpo")
BUILT_IN_OBJECTIVES = ("sft", *PREFERENCE_OBJECTIVES)


@cache  # to look takes 14 ms, and a sweep has a thousand recipes
def learns_from_pairs(objective: str) -> bool:
    """Whether an objective, built in or installed, learns from pairs."""
    if objective in BUILT_IN_OBJECTIVES:
        return objective in PREFERENCE_OBJECTIVES
    return objective in entry_points(group=PAIR_OBJECTIVES_GROUP).names


def list_installed_objectives() -> list[str]:
    """Those of others."""
    return sorted(entry_points(group=OBJECTIVES_GROUP).names | entry_points(group=PAIR_OBJECTIVES_GROUP).names)


def require_known_objective(name: str) -> str:
    """The same name. Raises ValueError, naming those there are, where it is of none."""
    if name in BUILT_IN_OBJECTIVES:  # to look for others takes 14 ms, of each of the thousand recipes of a sweep
        return name
    installed = list_installed_objectives()
    if name not in installed:
        raise ValueError(f"unknown objective: use {', '.join([*BUILT_IN_OBJECTIVES, *installed])}")
    return name


# The image that a recipe's pods run, pinned: by a digest, or by a tag that is a commit's or a release's (row G8).

IMAGE_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?/)?[a-z0-9][a-z0-9._/-]*(?::(?P<tag>\w[\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?",
    re.ASCII,
)


def require_pinned_image(image: str) -> str:
    """The image as it is. Raises ValueError where it is none, or is another one tomorrow."""
    found = IMAGE_REFERENCE.fullmatch(image)
    if found is None:
        raise ValueError(f"{image[:200]!r} is no image: write REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:DIGEST")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise ValueError(f"{image!r} is another image tomorrow: give it the tag of a commit or release, or a digest")
    return image


# Which base model a recipe begins with, as it names it. How that becomes files: `recipes.export.base_model`.

PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?(==[\w.!+]+)?", re.ASCII)


class BaseModelRef(FrozenModel):
    """A base model, pinned by the SHA-256 of the file or folder manifest that it resolves from.

    A name alone, such as `zenlm/zen-7b`, is a model whose files are not at hand yet: such a recipe can be planned with, and
    is trained once it is pinned.
    """

    uri: str = Field(
        min_length=1, description="pypi://PACKAGE, file:///FOLDER, or the name of a model that is not pinned yet"
    )
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    @field_validator("uri")
    @classmethod
    def validate_syntax(cls, value: str) -> str:
        """Raises ValueError, as urlparse does of an address in brackets that is none."""
        urlparse(value)
        return value

    @property
    def is_folder(self) -> bool:
        """Of the machine that reads it. FILE: is one too, and was let through where no folder may be named."""
        return urlparse(self.uri).scheme == "file"

    @property
    def folder(self) -> Path:
        """Where it lies, of one that is a folder."""
        return Path(unquote(urlparse(self.uri).path))

    @property
    def missing_folder_problem(self) -> str | None:
        """That no model lies in its folder, where none does."""
        exists = (self.folder / "config.json").is_file()
        return None if exists else f"unknown base model {self.uri}: no config.json in {self.folder}"

    @property
    def artifact_uri(self) -> str | None:
        """Where in the object store the model lies once it was resolved; none of one that is not pinned."""
        return uris.base_model(self.sha256) if self.sha256 else None

    @model_validator(mode="before")
    @classmethod
    def accept_plain_name(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value

    @property
    def problem(self) -> str | None:
        """Why nobody can get at its files, as far as the reference alone says; none where somebody may.

        One that is in the store already is found by its hash, whatever its name.
        """
        address, shortened = urlparse(self.uri), self.uri[:100]
        if address.scheme == "pypi" and not PACKAGE_NAME.fullmatch(address.netloc):
            return f"unknown base model {shortened}: that is no name of a package"
        if address.scheme not in ("pypi", "file", *([] if self.sha256 else [""])):
            return f"unknown base model {shortened}: use pypi://PACKAGE or file:///FOLDER"
        if self.sha256 is None:
            return (
                f"base model {shortened} is not pinned: set base_model to {{uri: file:///FOLDER, sha256: ...}} of its files"
            )
        return None
