"""Artifacts in the object store, and what each was made from."""

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, String, Table, Text

from resources.metadata.tables.base import SEQUENCE, schema

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
