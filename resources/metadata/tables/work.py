"""What the asset graph works on: dataset versions and jobs; and the log of all changes."""

from sqlalchemy import JSON, BigInteger, Column, Index, Integer, String, Table, Text, UniqueConstraint

from resources.metadata.tables.base import SEQUENCE, schema

dataset_versions = Table(
    "dataset_versions",
    schema,
    Column("id", String(36), primary_key=True),
    Column("name", String(250), nullable=False),
    Column("version", Integer, nullable=False),
    Column("organization", String(250), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", String(250), nullable=False),
    Column("storage_path", Text, nullable=False),
    Column("format", String(20), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("num_records", BigInteger, nullable=False),
    Column("schema", JSON, nullable=False),
    Column("splits", JSON, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("lineage", JSON, nullable=False),
    Column("content_sha256", String(64), nullable=False),
    Column("artifact", JSON, nullable=False, doc="recipes.schema.Artifact of the version"),
    UniqueConstraint("organization", "name", "version"),
    UniqueConstraint("organization", "name", "content_sha256"),
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
    Column("artifacts", JSON, nullable=False, doc="role -> recipes.schema.Artifact, once completed"),
    Column("evaluation", JSON, doc="report of the evaluation and verdict of the gate, once evaluated"),
    Index("jobs_by_status", "status", "submitted_at"),
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
    sqlite_autoincrement=True,
)
