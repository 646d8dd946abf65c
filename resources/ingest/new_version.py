"""The request for a dataset version, as the assets, the API and the command line make it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from resources.metadata.datasets import DatasetVersion

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


def find_unapplied_fields(request: NewVersion, version: DatasetVersion) -> dict[str, JsonValue]:
    """What was said of files whose content is a version already, and that the version does not say: sending files again
    changes nothing of it, and whoever did is told.
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
