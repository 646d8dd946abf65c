"""What every table is declared with."""

from sqlalchemy import BigInteger, Integer, MetaData

schema = MetaData()
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
"""SQLite gives out numbers by itself only for a column that is declared exactly INTEGER."""
