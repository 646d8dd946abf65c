"""Import address that existing dagster.yaml files name; see `resources.orchestration.postgres_storage`."""

from resources.orchestration.postgres_storage import OwnSchemaStorage

__all__ = ["OwnSchemaStorage"]
