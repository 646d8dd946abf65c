"""Tables of MLflow's inputs and logged models: what runs read and created."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from resources.metadata.tables.base import SEQUENCE, schema

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
"""MLflow's datasets: descriptions that a script logs. Our dataset versions are in `dataset_versions`."""

run_inputs = Table(
    "run_inputs",
    schema,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("input_id", ForeignKey("inputs.id"), primary_key=True),
    Column("tags", JSON, nullable=False),
    # The default is for servers of the previous release, which insert rows until they are replaced.
    Column("place", Integer, nullable=False, server_default=text("0"), doc="among the run's inputs, as they were logged"),
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
    # No foreign key: as in MLflow, the model may be unknown to this server, for example one of another tracking server.
    Column("model_id", String(256), primary_key=True),
    Column("direction", String(10), primary_key=True, doc="input | output"),
    Column("step", BigInteger, nullable=False),
    Column("place", Integer, nullable=False, server_default=text("0"), doc="among the run's models, as they were logged"),
)
