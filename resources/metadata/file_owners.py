"""Whose a file of the store is, by its place."""

from urllib.parse import unquote

from sqlalchemy import select

from resources.metadata.database import Database
from resources.metadata.registry.model_key import organization_of_place
from resources.metadata.tables import experiments, logged_models, runs


def organization_of(database: Database, uri: str) -> str:
    """Of a run's or a logged model's file the run's or the model's organization, of others their place's; else ""."""
    match uri.removeprefix("s3://").split("/"):
        case ["hanzo-ml", "runs" | "checkpoints", owner, *_]:
            of_run = select(runs.c.organization).where(runs.c.id == owner)
            of_model = select(experiments.c.organization).join(logged_models).where(logged_models.c.id == owner)
            with database.read() as connection:
                return connection.execute(of_run.union_all(of_model)).scalar() or ""
        case ["hanzo-ml", "artifacts", folder, *_]:
            return unquote(folder.removeprefix("@"))
        case ["hanzo-ml", "datasets", *below] | ["hanzo-models", *below]:
            return organization_of_place(below) or ""
        case _:
            return ""
