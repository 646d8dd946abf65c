"""Whose a file of the store is, by its place."""

from sqlalchemy import select

from recipes.storage import uris
from resources.metadata.database import Database
from resources.metadata.registry.model_key import organization_of_place
from resources.metadata.tables import experiments, logged_models, runs


def organization_of(database: Database, uri: str) -> str:
    """Of a run's or a logged model's file the run's or the model's organization, of others their place's; else ""."""
    match uri.removeprefix("s3://").split("/"):
        case [uris.PRODUCT_BUCKET, "runs" | "checkpoints", owner, *_]:
            of_run = select(runs.c.organization).where(runs.c.id == owner)
            of_model = select(experiments.c.organization).join(logged_models).where(logged_models.c.id == owner)
            with database.read() as connection:
                return connection.execute(of_run.union_all(of_model)).scalar() or ""
        case [uris.PRODUCT_BUCKET, "artifacts", folder, *_]:
            return uris.organization_of(folder) or ""
        case [uris.PRODUCT_BUCKET, "datasets", *below] | [uris.MODELS_BUCKET, *below]:
            return organization_of_place(below) or ""
        case _:
            return ""
