"""Tables of dataset versions, their validations, and the lineage of artifacts."""

from sqlalchemy import JSON, BigInteger, Boolean, Column, ForeignKey, Index, Integer, String, Table, Text, UniqueConstraint

from resources.metadata.tables.base import SEQUENCE, schema

# Dataset versions, and the objects in the store held by them and by versions in progress.

datasets = Table(
    "datasets",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("name", String(250), primary_key=True),
    Column("last_version", Integer, nullable=False, doc="kept when that version is deleted: numbers are never reused"),
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
    Column("artifact", JSON, nullable=False, doc="recipes.storage.manifest.Artifact of the version"),
    UniqueConstraint("organization", "name", "version"),
    UniqueConstraint("organization", "name", "content_sha256"),
)

dataset_problems = Table(
    "dataset_problems",
    schema,
    Column("dataset_id", ForeignKey("dataset_versions.id", ondelete="CASCADE"), primary_key=True),
    Column("problem", Text, nullable=False),
    Column("told_at", BigInteger, nullable=False),
)
"""Why the last attempt to check or split a version failed; no row if it succeeded."""

dataset_holders = Table(
    "dataset_holders",
    schema,
    # The id of the version, which may not exist yet, or not any more.
    Column("id", String(36), primary_key=True),
    Column("organization", String(250), nullable=False),
    Column("place", Text, nullable=False, doc="prefix of objects that only this holder uses; empty without any"),
    Column("updated_at", BigInteger, nullable=False),
    Index("dataset_holders_by_age", "organization", "updated_at"),
)
"""Holders of chunks. One that is not a version and was not updated for a day is dead, and its chunks are garbage."""

chunk_claims = Table(
    "chunk_claims",
    schema,
    Column("organization", String(250), primary_key=True),
    Column("sha256", String(64), primary_key=True),
    Column("holder", ForeignKey("dataset_holders.id"), primary_key=True),
    Index("chunk_claims_by_holder", "holder"),
)
"""A chunk is removed with its last claim."""


# Statistics of dataset versions, and the verdicts of their checks.

dataset_validations = Table(
    "dataset_validations",
    schema,
    Column("dataset_id", ForeignKey("dataset_versions.id", ondelete="CASCADE"), primary_key=True),
    Column("statistics", JSON, nullable=False, doc="recipes.storage.manifest.Artifact of the version's statistics"),
    Column("facts", JSON, nullable=False, doc="recipes.contracts.validation_results.ValidationFacts"),
    Column("leaks", JSON, doc="recipes.contracts.validation_results.Leaks, once the version is split"),
    Column("verdicts", JSON, nullable=False, doc="check -> resources.datasets.check_verdicts.Verdict"),
    Column("blocked", Text, nullable=False, doc="why nothing may be split or trained; empty where it may"),
    Column("checked_at", BigInteger, nullable=False),
    Column("reference", String(300), nullable=False, doc="what it was compared with, as NAME@VERSION; empty for nothing"),
)


# Artifacts in the object store, and what each was made from.

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
    # An object may have several rows while it is overwritten: its content matches one of them (see `file_hashes.py`).
    Column("id", SEQUENCE, primary_key=True, autoincrement=True),
    Column("uri", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("stored", Boolean, nullable=False, doc="whether the object store has committed these bytes"),
    Column("recorded_at", BigInteger, nullable=False),
    Column("found_sha256", String(64), doc="hash of corrupt content that was read and reported"),
    Index("artifact_files_by_uri", "uri"),
)
"""Uploaded files. Files published by the asset graph have a manifest instead."""

lineage_edges = Table(
    "lineage_edges",
    schema,
    Column("child", ForeignKey("artifacts.digest"), primary_key=True),
    Column("role", String(100), primary_key=True),
    Column("parent", String(64), nullable=False),
    Index("edges_by_parent", "parent"),
)
