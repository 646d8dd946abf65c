"""Sweeps and their trials: all that there is to know of a search."""

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Index, Integer, String, Table, Text

from resources.metadata.tables.base import schema

sweeps = Table(
    "sweeps",
    schema,
    Column("id", ForeignKey("runs.id"), primary_key=True, doc="of its parent run"),
    Column("experiment", String(500), nullable=False),
    Column("status", String(20), nullable=False, doc="running | completed | failed | cancelled"),
    Column("config", JSON, nullable=False, doc="resources.hpo.sweep_config.SweepConfig"),
    Column("user_id", String(250), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("reason", Text, nullable=False, doc="why it failed, one line"),
    Column("created_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Index("sweeps_by_status", "status", "created_at"),
    Index("sweeps_by_organization", "organization", "created_at"),
)

sweep_trials = Table(
    "sweep_trials",
    schema,
    Column("sweep_id", ForeignKey("sweeps.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("job_id", ForeignKey("jobs.id"), nullable=False, unique=True),
    Column(
        "status",
        String(20),
        nullable=False,
        doc="running | pruning | cancelling | completed | pruned | failed | cancelled",
    ),
    Column("params", JSON, nullable=False),
    Column("value", Double, doc="last value of the objective"),
    Column("step", BigInteger, doc="at which the value was logged"),
    Column("generation", Integer, nullable=False, doc="of a population; 0 without one"),
    Column("member", Integer, nullable=False),
    Column("start_from", Integer, doc="number of the trial whose weights it starts from"),
    Column("reason", Text, nullable=False, doc="why it was stopped or failed, one line"),
    Column("created_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
)
