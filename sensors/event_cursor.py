"""Following the event table: the cursor of a sensor is the `seq` of the last event that it is done with."""

import dagster as dg
from sqlalchemy import Connection

from hanzo_ml_assets.definition import SANDBOX
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import Event, read_after
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION

MAX_EVENTS = 20
"""Per tick: one that launched 50 runs took over a minute, and a tick has 60 seconds."""

INTERVAL_SECONDS = 1
"""The daemon looks at its sensors every 5 seconds at most; this only says that each look counts."""

SELDOM_SECONDS = 15
"""Of what nobody waits for: Dagster's daemon writes down each look several times."""


def position(context: dg.SensorEvaluationContext) -> int:
    """The last event that was dealt with; 0 for a fresh or reset cursor."""
    return int(context.cursor) if context.cursor and context.cursor.isdigit() else 0


def new_events(context: dg.SensorEvaluationContext, connection: Connection, *types: str) -> list[Event]:
    return read_after(connection, position(context), types, MAX_EVENTS)


def home_of(context: dg.SensorEvaluationContext, kind: str, name: str) -> str:
    """The definition that a dataset or model belongs to: its own where there is one, else the sandbox."""
    assert context.repository_def is not None
    step = "version" if kind == "datasets" else "checkpoint"
    return name if context.repository_def.asset_graph.has(dg.AssetKey([kind, name, step])) else SANDBOX


def home_of_version(context: dg.SensorEvaluationContext, version: DatasetVersion) -> str:
    """A definition is about the default organization's dataset of its name: no other's is checked by its rules."""
    return home_of(context, "datasets", version.name) if version.organization == DEFAULT_ORGANIZATION else SANDBOX
