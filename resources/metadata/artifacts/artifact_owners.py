"""Whose files lie at a path of the artifact proxy: a run's or a logged model's, wherever its experiment keeps them.

What belongs here: the look-up. What does not: which places there can be (`artifact_locations`), and the files themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, literal, select

from resources.metadata.artifacts.artifact_locations import PROXY, VERSIONS
from resources.metadata.tables import experiments, logged_models, runs

FOLDER = "artifacts"


@dataclass(frozen=True)
class FilesOwner:
    """A run or a logged model, and `path` in its files ("" for all of them)."""

    id: str
    is_model: bool
    organization: str
    lifecycle_stage: str
    path: str


def files_owner(connection: Connection, proxied: str) -> FilesOwner | None:
    """The owner of the files at `LOCATION/RUN/artifacts[/PATH]` or `LOCATION/models/MODEL/artifacts[/PATH]`; None where no
    run and no model keeps its files there.

    Args:
        proxied: a path without empty parts.
    """
    wanted = {(identifier, uri): path for identifier, uri, path in candidates(proxied)}
    if not wanted:
        return None
    ids = {identifier for identifier, _ in wanted}
    of_runs = select(
        runs.c.id, runs.c.artifact_uri, runs.c.organization, runs.c.lifecycle_stage, literal(False).label("is_model")
    ).where(runs.c.id.in_(ids))
    of_models = (
        select(
            logged_models.c.id,
            logged_models.c.artifact_uri,
            experiments.c.organization,
            logged_models.c.lifecycle_stage,
            literal(True).label("is_model"),
        )
        .join(experiments, experiments.c.id == logged_models.c.experiment_id)
        .where(logged_models.c.id.in_(ids))
    )
    for row in connection.execute(of_runs.union_all(of_models)):
        path = wanted.get((row.id, row.artifact_uri))
        if path is not None:
            return FilesOwner(row.id, bool(row.is_model), row.organization, row.lifecycle_stage, path)
    return None


def candidates(proxied: str) -> Iterator[tuple[str, str, str]]:
    """Every id that a path may be of, the URI at which its files would be, and the path in them."""
    parts = proxied.split("/")
    for end in range(1, len(parts)):
        if parts[end] == FOLDER and parts[end - 1] != VERSIONS:
            yield parts[end - 1], f"{PROXY}:/{'/'.join(parts[: end + 1])}", "/".join(parts[end + 1 :])
