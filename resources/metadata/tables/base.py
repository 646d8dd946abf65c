"""Schema object and sequence type that all tables share."""

from sqlalchemy import BigInteger, Integer, MetaData

schema = MetaData()
SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
"""SQLite generates numbers only for columns declared exactly as INTEGER."""
