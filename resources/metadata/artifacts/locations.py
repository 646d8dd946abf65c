"""Whose files lie at a path of the artifact proxy: a run's or a logged model's, wherever its experiment keeps them.

What belongs here: the look-up, and the folders above those files. What does not: which places there can be
(`artifact_locations`), and the files themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, literal, select

from resources.metadata.artifacts.artifact_locations import VERSIONS, proxied_uri
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
            yield parts[end - 1], proxied_uri("/".join(parts[: end + 1])), "/".join(parts[end + 1 :])


def folders_above(connection: Connection, proxied: str, organization: str) -> list[str] | None:
    """The folders directly below a path above the files of an organization's runs and logged models; None where it is not.

    As in MLflow those are `artifacts` of a run or a model, the runs and `models` of an experiment, and the models in there.
    They are known without a look into the store, so one of a run that logged no file is among them. Holds all their names.
    """
    owner = files_owner(connection, f"{proxied}/{FOLDER}")
    if owner is not None and not owner.path and owner.organization == organization:
        return [FOLDER]
    place, _, last = proxied.rpartition("/")
    if last == VERSIONS and (found := experiments_at(connection, place, organization)):
        return list(connection.scalars(select(logged_models.c.id).where(logged_models.c.experiment_id.in_(found))))
    if not (found := experiments_at(connection, proxied, organization)):
        return None
    any_model = select(logged_models.c.id).where(logged_models.c.experiment_id.in_(found)).limit(1)
    of_models = [VERSIONS] if connection.scalar(any_model) else []
    return [*connection.scalars(select(runs.c.id).where(runs.c.experiment_id.in_(found))), *of_models]


def experiments_at(connection: Connection, proxied: str, organization: str) -> list[int]:
    """The experiments that keep their files at a path; several may be at one that their clients chose."""
    uri = proxied_uri(proxied)
    at_place = experiments.c.artifact_location.in_([uri, f"{uri}/"]) & (experiments.c.organization == organization)
    return list(connection.scalars(select(experiments.c.id).where(at_place)))
