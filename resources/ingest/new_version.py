"""A dataset version that somebody asks for: what the asset, the API and the command line hand to `create`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

AS_UPLOADED = "none: as uploaded"


@dataclass(frozen=True)
class NewVersion:
    """What is asked for. `transform` and `parents` (NAME@VERSION) say what was done to make the files, and of what."""

    name: str
    format: str
    user: str
    organization: str
    tags: Sequence[str] = ()
    metadata: Mapping[str, JsonValue] | None = None
    transform: JsonValue = AS_UPLOADED
    parents: Sequence[str] = ()
