"""Resolve paths of the artifact proxy to their owners.

- `EXPERIMENT/RUN/artifacts/...`, `EXPERIMENT/models/MODEL/artifacts/...`: files of a run or a logged model; an experiment
  created with `artifact_location="mlflow-artifacts:/PLACE"` has PLACE instead of its number;
- `models/NAME/VERSION/...`: a registered model's files, read-only (`api.routes.mlflow.model_versions`);
- any other path that does not begin with a number is free, for scripts with their own layout.

Numbers are reserved for experiments: a path that names no run of its experiment is refused rather than treated as free, so
that a mistyped id never hides a file.
"""

from dataclasses import dataclass, replace

from api.artifacts.run_artifacts import Entry, OwnedArtifacts, RunArtifacts
from api.artifacts.verified_files import VerifiedFiles
from recipes.storage import uris
from resources.errors import HanzoError, not_found
from resources.metadata.artifacts.locations import EXPERIMENT_ID_PATTERN, MODELS_PART, find_files_owner, list_parent_folders
from resources.metadata.database import Database
from resources.metadata.tracking.logged_model_records import logged_model_not_found
from resources.metadata.tracking.run_data import check_run_active


@dataclass(frozen=True)
class ArtifactLocation:
    """A path below the files of a run, logged model or organization ("" for all)."""

    artifacts: OwnedArtifacts
    owner: str
    path: str
    is_model: bool = False
    lifecycle_stage: str = "active"

    def check_writable(self) -> None:
        """Raise a 4xx if the owner is deleted."""
        if self.is_model and self.lifecycle_stage != "active":
            raise logged_model_not_found(self.owner)
        check_run_active(self.owner, self.lifecycle_stage)


class ArtifactLocations:
    """Resolves paths of the artifact proxy."""

    def __init__(self, database: Database, files: VerifiedFiles) -> None:
        self._database = database
        self._run_artifacts = RunArtifacts(files)
        self._free = OwnedArtifacts(files, uris.organization_artifacts)

    def locate(self, proxied: str, organization: str) -> ArtifactLocation:
        """Return the location of a checked path ("" for the root) for an organization.

        Raises:
            HanzoError: 404 for a path that begins with a number and is no run's or logged model's of the organization; the
                message does not reveal whether another organization has it.
        """
        location = self._owned(proxied, organization)
        if location is not None:
            return location
        if is_reserved(proxied):
            raise no_such_location()
        return ArtifactLocation(self._free, organization, proxied)

    def entries(self, proxied: str, organization: str) -> list[Entry]:
        """List entries directly below a checked path, by name, relative to it.

        Raises:
            HanzoError: 404 as `locate`, except for parents of the files of runs or logged models, which clients browse.
        """
        location = self._owned(proxied, organization)
        if location is not None:
            return relative_entries(location.artifacts.entries(location.owner, location.path))
        with self._database.read() as connection:
            folders = list_parent_folders(connection, proxied, organization)
        if folders is None and is_reserved(proxied):
            raise no_such_location()
        free = [] if is_reserved(proxied) else relative_entries(self._free.entries(organization, proxied))
        return sorted([*free, *(Entry(name, True) for name in folders or ())], key=lambda entry: entry.path)

    def _owned(self, proxied: str, organization: str) -> ArtifactLocation | None:
        with self._database.read() as connection:
            found = find_files_owner(connection, proxied)
        if found is None or found.organization != organization:
            return None
        return ArtifactLocation(self._run_artifacts, found.id, found.path, found.is_model, found.lifecycle_stage)


def is_reserved(proxied: str) -> bool:
    """Return whether a path is reserved for files of runs, logged models and model versions."""
    first = proxied.partition("/")[0]
    return first == MODELS_PART or EXPERIMENT_ID_PATTERN.fullmatch(first) is not None


def relative_entries(entries: list[Entry]) -> list[Entry]:
    return [replace(entry, path=entry.path.rpartition("/")[2]) for entry in entries]


def no_such_location() -> HanzoError:
    return not_found(
        "There is no such artifact location: it must be EXPERIMENT_ID/RUN_ID/artifacts/PATH or "
        "EXPERIMENT_ID/models/MODEL_ID/artifacts/PATH of an experiment that exists, or begin with another name"
    )
