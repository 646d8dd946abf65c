"""The Dagster instance: configuration, storages, launchers of run workers, daemon. Only this folder imports Dagster here."""
