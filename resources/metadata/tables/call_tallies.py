"""Calls that are counted, on their way into the log."""

from sqlalchemy import BigInteger, Column, String, Table, Text

from resources.metadata.tables.base import schema

call_tallies = Table(
    "call_tallies",
    schema,
    Column("id", String(32), primary_key=True, doc="a hash of the call"),
    Column("call", Text, nullable=False, doc="resources.metadata.audit_log.AuditedCall as JSON"),
    Column("number", BigInteger, nullable=False, doc="of its equals that are not in `events` yet"),
    Column("taken_at", BigInteger, nullable=False, doc="when some were last put there; 0 before"),
    sqlite_with_rowid=False,
    # As for `runs`: each logged metric moves a count.
    postgresql_with={"fillfactor": 50},
)
