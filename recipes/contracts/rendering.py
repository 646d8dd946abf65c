"""How records are rendered for a model.

A run keeps the rendering that it started with.
"""

from enum import IntEnum
from typing import Annotated, Any

from pydantic import Field, ValidationInfo


class Rendering(IntEnum):
    """Preprocessing of a record before the chat template."""

    AS_STORED = 1
    """Messages and tools as stored; an instruction without its other columns."""
    AS_SERVED = 2
    """Normalized as in the serving engine; an instruction with its input and its system message."""


CURRENT_RENDERING = Rendering.AS_SERVED
KeptRendering = Annotated[Rendering, Field(exclude_if=lambda value: value is Rendering.AS_STORED)]
"""Field for documents. Those from before `AS_SERVED` lack it and keep `AS_STORED`."""


def restore_rendering(document: Any, info: ValidationInfo) -> Any:
    """Complete a stored document: without `rendering` it is from before `AS_SERVED`."""
    if info.mode == "json" and isinstance(document, dict) and "rendering" not in document:
        return {**document, "rendering": Rendering.AS_STORED}
    return document
