"""Import address that existing manifests call; see `resources.orchestration.instance`."""

from resources.orchestration.instance import migrate_dagster

__all__ = ["migrate_dagster"]
