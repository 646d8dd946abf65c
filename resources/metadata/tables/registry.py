"""Tables of registered models, versions and deployments. Names are unique per organization."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from resources.metadata.tables.base import SEQUENCE, schema


def model_foreign_key() -> ForeignKeyConstraint:
    """Return a key that renames and deletes a row with its model."""
    return ForeignKeyConstraint(
        ["organization", "name"],
        ["registered_models.organization", "registered_models.name"],
        onupdate="CASCADE",
        ondelete="CASCADE",
    )


registered_models = Table(
    "registered_models",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("creation_time", BigInteger, nullable=False),
    Column("last_update_time", BigInteger, nullable=False),
    Column("description", Text, nullable=False),
    Column("last_version", Integer, nullable=False, doc="newest number given out; deleting a version frees none"),
)

registered_model_tags = Table(
    "registered_model_tags",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    model_foreign_key(),
)

model_aliases = Table(
    "model_aliases",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("alias", String(255), primary_key=True),
    Column("version", Integer, nullable=False),
    model_foreign_key(),
)

model_versions = Table(
    "model_versions",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("stage", String(20), nullable=False, doc="none | staging | production | archived"),
    Column("status", String(20), nullable=False, doc="pending | ready | failed | quarantined"),
    Column("reason", Text, nullable=False, doc="why it is quarantined, or its export failed"),
    Column("run_id", String(256)),
    Column("sole_run_id", String(256), doc="the run of which it is the only version; null if a run may have many"),
    Column("model_id", String(256), doc="the logged model that it was made from"),
    Column("run_link", Text, nullable=False),
    Column("architecture", String(250), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("method", String(20), nullable=False),
    Column("artifacts", JSON, nullable=False, doc="format -> recipes.storage.manifest.Artifact and checksum"),
    Column("metrics", JSON, nullable=False),
    Column("training_config", JSON, nullable=False),
    Column("source", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", String(250), nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    UniqueConstraint("organization", "name", "sole_run_id"),
    Index("versions_by_run", "run_id"),
    model_foreign_key(),
)

model_version_tags = Table(
    "model_version_tags",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("key", String(250), primary_key=True),
    Column("value", Text, nullable=False),
    ForeignKeyConstraint(
        ["organization", "name", "version"],
        ["model_versions.organization", "model_versions.name", "model_versions.version"],
        onupdate="CASCADE",
        ondelete="CASCADE",
    ),
)

deployments = Table(
    "deployments",
    schema,
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("organization", String(250), nullable=False),
    Column("name", String(250), nullable=False),
    Column("version", Integer, nullable=False),
    Column("promotion", BigInteger, nullable=False, unique=True, doc="events.seq of the promotion that asked for it"),
    Column("status", String(20), nullable=False, doc="deploying | serving | failed | replaced | withdrawing | withdrawn"),
    Column("reason", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Index("deployments_by_model", "organization", "name", "id"),
    Index("deployments_by_status", "status"),
)
