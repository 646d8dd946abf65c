"""The Dagster instance: storages, daemon, PostgreSQL schema. Only this folder and `compute` import Dagster."""
