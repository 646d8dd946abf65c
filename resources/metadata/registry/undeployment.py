"""Undeploy a model: archive its production version for rollback, and withdraw its deployments."""

from resources.errors import not_found
from resources.metadata.database import Database
from resources.metadata.field_rules import printable
from resources.metadata.registry import deployments
from resources.metadata.registry.deployments import Deployment
from resources.metadata.registry.model_names import ModelKey
from resources.metadata.registry.registered_model_rows import lock_model
from resources.metadata.registry.version_lifecycle import Registry


def undeploy(database: Database, model: ModelKey, *, user: str) -> list[Deployment]:
    """Stop serving a model. Returns the deployments being withdrawn (idempotent).

    Raises:
            HanzoError: there is no such model, or no version of it is in production or served.
    """
    registry = Registry(database)
    with database.write() as connection:
        lock_model(connection, model)
        promoted = registry.in_production(model, connection)
        if promoted is not None:
            registry.promote(model, promoted.version, "archived", user=user, connection=connection)
        # The served version may be older than the one in production, or no longer in production.
        deployments.withdraw_model(connection, model)
        found = list(deployments.list_withdrawing(connection, model))
        if promoted is None and not found:
            raise not_found(f"nothing of model '{printable(model.name)}' is served: see `hanzo-ml model list`")
        return found
