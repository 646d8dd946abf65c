"""The request for a dataset version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from resources.metadata.datasets import DatasetVersion

AS_UPLOADED = "none: as uploaded"


@dataclass(frozen=True)
class NewVersion:
    """A request for a version.

    `transform` and `parents` (NAME@VERSION) state how the files were made, and from what.
    """

    name: str
    format: str
    user: str
    organization: str
    tags: Sequence[str] = ()
    metadata: Mapping[str, JsonValue] | None = None
    transform: JsonValue = AS_UPLOADED
    parents: Sequence[str] = ()


def find_unapplied_fields(request: NewVersion, version: DatasetVersion) -> dict[str, JsonValue]:
    """Return what the request states differently from the existing version.

    The version has the same content. Sending files again does not change it, and the sender is informed of what was not
    applied.
    """
    existing_metadata = version.metadata
    different: dict[str, JsonValue] = {
        "tags": [tag for tag in dict.fromkeys(request.tags) if tag not in version.tags],
        "metadata": {
            key: value
            for key, value in (request.metadata or {}).items()
            if key not in existing_metadata or existing_metadata[key] != value
        },
        "format": request.format if request.format != version.format else "",
    }
    return {field: value for field, value in different.items() if value}
