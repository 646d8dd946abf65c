"""Import address that existing dagster.yaml files name; see `resources.orchestration.process_launcher`."""

from resources.orchestration.process_launcher import ProcessRunLauncher

__all__ = ["ProcessRunLauncher"]
