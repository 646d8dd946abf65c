"""Every table of the metadata database. Times are integers, milliseconds since 1970 UTC, as in MLflow's API."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

schema = MetaData()
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
"""SQLite gives out numbers by itself only for a column that is declared exactly INTEGER."""

experiments = Table(
    "experiments",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("name", String(500), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("artifact_location", Text, nullable=False),
    Column("lifecycle_stage", String(20), nullable=False),
    Column("creation_time", BigInteger, nullable=False),
    Column("last_update_time", BigInteger, nullable=False),
    UniqueConstraint("organization", "name"),
    sqlite_autoincrement=True,
)

experiment_tags = Table(
    "experiment_tags",
    schema,
    Column("experiment_id", ForeignKey("experiments.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
)

runs = Table(
    "runs",
    schema,
    Column("id", String(256), primary_key=True),
    Column("experiment_id", ForeignKey("experiments.id"), nullable=False),
    Column("name", String(500), nullable=False),
    Column("status", String(20), nullable=False, doc="queued | running | completed | failed | cancelled (row E1)"),
    Column("start_time", BigInteger),
    Column("end_time", BigInteger),
    Column("user_id", String(250), nullable=False),
    Column("organization", String(250), nullable=False),
    Column("artifact_uri", Text, nullable=False),
    Column("lifecycle_stage", String(20), nullable=False),
    Index("runs_by_experiment", "experiment_id", "start_time"),
)

run_tags = Table(
    "run_tags",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

params = Table(
    "params",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

latest_metrics = Table(
    "latest_metrics",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True, doc="names the series of this key in `metrics`"),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("key", String(250), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("timestamp", BigInteger, nullable=False),
    Column("value", Double, nullable=False),
    Column("is_nan", Boolean, nullable=False),
    UniqueConstraint("run_id", "key"),
)

metrics = Table(
    "metrics",
    schema,
    # A number where run and key would be 60 bytes, twice: a point takes 28 bytes in SQLite instead of 154, and is written
    # three times as fast. A foreign key would be looked up for every point: `write_group` writes both tables at once.
    Column("series", SEQUENCE, primary_key=True, autoincrement=False, doc="latest_metrics.id"),
    Column("step", BigInteger, primary_key=True),
    Column("timestamp", BigInteger, primary_key=True),
    Column("value", Double, primary_key=True),
    Column("is_nan", Boolean, primary_key=True),
    sqlite_with_rowid=False,
)

inputs = Table(
    "inputs",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("experiment_id", ForeignKey("experiments.id"), nullable=False),
    Column("name", String(500), nullable=False),
    Column("digest", String(36), nullable=False),
    Column("source_type", String(36), nullable=False),
    Column("source", Text, nullable=False),
    Column("schema", Text),
    Column("profile", Text),
    UniqueConstraint("experiment_id", "name", "digest"),
)
"""What MLflow's client calls datasets: descriptions that a script logs. Dataset versions of ours are `dataset_versions`."""

run_inputs = Table(
    "run_inputs",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("input_id", ForeignKey("inputs.id"), primary_key=True),
    Column("tags", JSON, nullable=False),
    Index("runs_by_input", "input_id"),
)

logged_models = Table(
    "logged_models",
    schema,
    Column("id", String(256), primary_key=True),
    Column("experiment_id", ForeignKey("experiments.id"), nullable=False),
    Column("name", String(500), nullable=False),
    Column("artifact_uri", Text, nullable=False),
    Column("status", String(20), nullable=False, doc="pending | ready | failed"),
    Column("status_message", Text, nullable=False),
    Column("model_type", String(500), nullable=False),
    Column("source_run_id", String(256)),
    Column("lifecycle_stage", String(20), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("logged_models_by_experiment", "experiment_id", "created_at"),
)

logged_model_params = Table(
    "logged_model_params",
    schema,
    Column("model_id", ForeignKey("logged_models.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
)

logged_model_tags = Table(
    "logged_model_tags",
    schema,
    Column("model_id", ForeignKey("logged_models.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
)

logged_model_metrics = Table(
    "logged_model_metrics",
    schema,
    Column("model_id", ForeignKey("logged_models.id"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("timestamp", BigInteger, primary_key=True),
    Column("value", Double, primary_key=True),
    Column("is_nan", Boolean, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("dataset_name", String(500), nullable=False),
    Column("dataset_digest", String(36), nullable=False),
)

run_models = Table(
    "run_models",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("model_id", ForeignKey("logged_models.id"), primary_key=True),
    Column("direction", String(10), primary_key=True, doc="input | output"),
    Column("step", BigInteger, nullable=False),
)

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

registered_models = Table(
    "registered_models",
    schema,
    Column("name", String(250), primary_key=True),
    Column("organization", String(250), nullable=False),
    Column("creation_time", BigInteger, nullable=False),
    Column("last_update_time", BigInteger, nullable=False),
    Column("description", Text, nullable=False),
    Column("last_version", Integer, nullable=False, doc="newest number given out; deleting a version frees none"),
)

registered_model_tags = Table(
    "registered_model_tags",
    schema,
    Column("name", ForeignKey("registered_models.name", onupdate="CASCADE", ondelete="CASCADE"), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
)

model_aliases = Table(
    "model_aliases",
    schema,
    Column("name", ForeignKey("registered_models.name", onupdate="CASCADE", ondelete="CASCADE"), primary_key=True),
    Column("alias", String(255), primary_key=True),
    Column("version", Integer, nullable=False),
)

model_versions = Table(
    "model_versions",
    schema,
    Column("name", ForeignKey("registered_models.name", onupdate="CASCADE", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("stage", String(20), nullable=False, doc="none | staging | production | archived (row O1)"),
    Column("status", String(20), nullable=False, doc="pending | ready | quarantined"),
    Column("reason", Text, nullable=False, doc="why it is quarantined"),
    Column("run_id", String(256)),
    Column("sole_run_id", String(256), doc="the run that it is the only version of; null where a run may have many"),
    Column("model_id", String(256), doc="the logged model that it was made from"),
    Column("run_link", Text, nullable=False),
    Column("architecture", String(250), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("method", String(20), nullable=False),
    Column("artifacts", JSON, nullable=False, doc="format -> recipes.schema.Artifact and checksum"),
    Column("metrics", JSON, nullable=False),
    Column("training_config", JSON, nullable=False),
    Column("source", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", String(250), nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    UniqueConstraint("name", "sole_run_id"),
    Index("versions_by_run", "run_id"),
)

model_version_tags = Table(
    "model_version_tags",
    schema,
    Column("name", String(250), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    ForeignKeyConstraint(
        ["name", "version"], ["model_versions.name", "model_versions.version"], onupdate="CASCADE", ondelete="CASCADE"
    ),
)

deployments = Table(
    "deployments",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("name", String(250), nullable=False),
    Column("version", Integer, nullable=False),
    Column("promotion", BigInteger, nullable=False, unique=True, doc="events.seq of the promotion that asked for it"),
    Column("status", String(20), nullable=False, doc="deploying | serving | failed | replaced"),
    Column("reason", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("deployments_by_model", "name", "id"),
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

artifacts = Table(
    "artifacts",
    schema,
    Column("digest", String(64), primary_key=True),
    Column("kind", String(50), nullable=False),
    Column("uri", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("recorded_at", BigInteger, nullable=False),
)

artifact_files = Table(
    "artifact_files",
    schema,
    # An object may have several rows while it is replaced: what lies there is one of them (`artifact_files.py` says why).
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("uri", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("stored", Boolean, nullable=False, doc="whether the object store said that it has these bytes"),
    Column("recorded_at", BigInteger, nullable=False),
    Column("found_sha256", String(64), doc="what was read there instead, since somebody was told"),
    Index("artifact_files_by_uri", "uri"),
)
"""Files that were uploaded. What the asset graph published has a manifest instead."""

lineage_edges = Table(
    "lineage_edges",
    schema,
    Column("child", ForeignKey("artifacts.digest"), primary_key=True),
    Column("role", String(100), primary_key=True),
    Column("parent", String(64), nullable=False),
    Index("edges_by_parent", "parent"),
)
