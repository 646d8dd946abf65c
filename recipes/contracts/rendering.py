"""How records are read and rendered for a model: what began in one way goes on in it."""

from enum import IntEnum
from typing import Annotated, Any

from pydantic import Field, ValidationInfo


class Rendering(IntEnum):
    """What a record becomes before a chat template sees it."""

    AS_STORED = 1
    """Messages and tools as they are stored, an instruction without its other columns."""
    AS_SERVED = 2
    """The normal form of the serving engine, and an instruction with its input and its system message."""


CURRENT_RENDERING = Rendering.AS_SERVED
KeptRendering = Annotated[Rendering, Field(exclude_if=lambda value: value is Rendering.AS_STORED)]
"""A field of documents. Those from before there was another way do not have it, and keep their form."""


def restore_rendering(document: Any, info: ValidationInfo) -> Any:
    """A document as it was written, whose missing `rendering` says that it is from before there was another way."""
    if info.mode == "json" and isinstance(document, dict) and "rendering" not in document:
        return {**document, "rendering": Rendering.AS_STORED}
    return document
