"""Signs of life."""

from sqlalchemy import BigInteger, Column, String, Table

from resources.metadata.tables.base import schema

heartbeats = Table(
    "heartbeats",
    schema,
    Column("name", String(100), primary_key=True, doc="of who works on what stands in this database"),
    Column("beat_at", BigInteger, nullable=False, doc="when it was last heard"),
)
