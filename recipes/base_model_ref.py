"""Which base model a recipe begins with, as it names it. How that becomes files: `recipes.base_model`."""

from typing import Any
from urllib.parse import urlparse

from pydantic import Field, field_validator, model_validator

from recipes.frozen import Frozen


class BaseModelRef(Frozen):
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
    def can_be_read(cls, value: str) -> str:
        """Raises ValueError, as urlparse does of an address in brackets that is none."""
        urlparse(value)
        return value

    @property
    def is_folder(self) -> bool:
        """Of the machine that reads it. FILE: is one too, and was let through where no folder may be named."""
        return urlparse(self.uri).scheme == "file"

    @property
    def artifact_uri(self) -> str | None:
        """Where in the object store the model lies once it was resolved; none of one that is not pinned."""
        return f"s3://hanzo-models/base/{self.sha256}" if self.sha256 else None

    @model_validator(mode="before")
    @classmethod
    def may_be_a_name(cls, value: Any) -> Any:
        return {"uri": value} if isinstance(value, str) else value
