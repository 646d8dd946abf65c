"""The logged model that `runs:/RUN/NAME` means: MLflow 3 keeps what `log_model(name=...)` logs by itself, not in the run.

Its client looks for the files where they are: in the run, and in the newest model of that name that the run made.
"""

from sqlalchemy import Connection, select

from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.metadata.artifacts.artifact_locations import is_proxied
from resources.metadata.tables import logged_models, runs


def model_of_run(connection: Connection, store: Store, run_id: str, path: list[str]) -> str | None:
    """The id of the model of a run that is called as a path begins, where it has files at the rest of it."""
    if not path:
        return None
    query = (
        select(logged_models.c.id, logged_models.c.artifact_uri)
        .join(runs, runs.c.id == logged_models.c.source_run_id)
        .where(
            runs.c.id == run_id,
            logged_models.c.experiment_id == runs.c.experiment_id,
            logged_models.c.name == path[0],
            logged_models.c.lifecycle_stage == "active",
        )
        .order_by(logged_models.c.created_at.desc(), logged_models.c.id)
        .limit(1)
    )
    model = connection.execute(query).first()
    if model is None:
        return None
    there = not is_proxied(model.artifact_uri)  # only clients look where others are
    place = uris.run_artifacts(model.id, *path[1:])
    return str(model.id) if there or holds_files(store, place) else None


def holds_files(store: Store, uri: str) -> bool:
    try:
        return store.exists(uri)
    except BrokenArtifact:
        return False
