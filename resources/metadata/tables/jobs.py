"""Tables of jobs, their tokens, sweeps, the event log and heartbeats."""

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Index, Integer, String, Table, Text

from resources.metadata.tables.base import SEQUENCE, schema

# Counts of calls that are not in the audit log yet.

call_tallies = Table(
    "call_tallies",
    schema,
    Column("id", String(32), primary_key=True, doc="a hash of the call"),
    Column("call", Text, nullable=False, doc="resources.metadata.audit_log.AuditedCall as JSON"),
    Column("number", BigInteger, nullable=False, doc="equal calls that are not in `events` yet"),
    Column("taken_at", BigInteger, nullable=False, doc="when they were last flushed; 0 before"),
    sqlite_with_rowid=False,
    # As for `runs`: each logged metric updates a count.
    postgresql_with={"fillfactor": 50},
)


# Positions of event readers that are stored here.

event_positions = Table(
    "event_positions",
    schema,
    Column("reader", String(100), primary_key=True),
    Column("seq", BigInteger, nullable=False, doc="of the last event that it has processed"),
)


heartbeats = Table(
    "heartbeats",
    schema,
    Column("name", String(100), primary_key=True, doc="of a component that works on data in this database"),
    Column("beat_at", BigInteger, nullable=False, doc="time of its last heartbeat"),
)


jobs = Table(
    "jobs",
    schema,
    Column("id", String(256), primary_key=True, doc="of a training job: the id of its tracking run"),
    Column("name", String(250), nullable=False),
    Column("type", String(20), nullable=False),
    Column("status", String(20), nullable=False, doc="queued | running | completed | failed | cancelled"),
    Column("config", JSON, nullable=False),
    Column("user_id", String(250), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("submitted_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("reason", Text, nullable=False, doc="why it waits or why it failed, one line"),
    Column("artifacts", JSON, nullable=False, doc="role -> recipes.storage.manifest.Artifact, once completed"),
    Column("evaluation", JSON, doc="report of the evaluation and verdict of the gate, once evaluated"),
    Index("jobs_by_status", "status", "submitted_at"),
    # Both end in the order of a page of jobs. Without the second, a page of one status would scan the whole first index.
    Index("jobs_by_organization", "organization", "submitted_at", "id"),
    Index("jobs_by_organization_and_status", "organization", "status", "submitted_at", "id"),
)

job_tokens = Table(
    "job_tokens",
    schema,
    Column("sha256", String(64), primary_key=True, doc="of the token, which only the job's program knows"),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Index("job_tokens_by_job", "job_id"),
)

events = Table(
    "events",
    schema,
    Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
    Column(
        "topic", String(20), nullable=False, doc="jobs | metrics | models | gpu | audit | datasets (prefix not included)"
    ),
    Column("key", String(256), nullable=False),
    Column("type", String(50), nullable=False),
    Column("payload", JSON, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("events_by_type", "type", "seq"),
    Index("events_by_key", "key", "type", "seq"),
    Index("events_by_time", "created_at", "seq"),
    sqlite_autoincrement=True,
)


# Sweeps and their trials: the complete state of a search.

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
