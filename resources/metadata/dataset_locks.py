"""A version's deletion, and whatever is made of it, wait for one another: what commits second sees what the first did.

SQLite has one writer anyway. PostgreSQL would commit both: the one that looked for who refers to the version, and the one
that looked whether it is there still.
"""

from sqlalchemy import Connection, select

from resources.metadata.tables import dataset_versions as table


def keep(connection: Connection, dataset_id: str) -> bool:
    """Whether the version is there; then it is until this transaction ends."""
    there = select(table.c.id).where(table.c.id == dataset_id).with_for_update(read=True, key_share=True)
    return connection.execute(there).first() is not None


def await_makers(connection: Connection, dataset_id: str) -> None:
    """Before the look at who refers to the version: whoever is at recording it ends, and nobody begins."""
    connection.execute(select(table.c.id).where(table.c.id == dataset_id).with_for_update())
