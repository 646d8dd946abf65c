"""The Dagster instance: configuration, storages, run launchers and daemon."""
