"""Readers of the events that keep their place here."""

from sqlalchemy import BigInteger, Column, String, Table

from resources.metadata.tables.base import schema

event_positions = Table(
    "event_positions",
    schema,
    Column("reader", String(100), primary_key=True),
    Column("seq", BigInteger, nullable=False, doc="of the last event that it is done with"),
)
