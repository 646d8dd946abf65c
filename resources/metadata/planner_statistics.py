"""What PostgreSQL's planner knows of its tables, kept up to date while they grow fast.

Autovacuum looks once a minute: until then a search among 2,000 runs that had just been logged was planned for a table of
none, and took twice the processor. SQLite needs none of it: its queries have one plan.
"""

from sqlalchemy import text

from resources.metadata.database import Database

GROWN = text(
    "SELECT relid::regclass::text FROM pg_stat_user_tables"
    " WHERE n_mod_since_analyze > 1000 AND n_mod_since_analyze > 0.2 * n_live_tup ORDER BY 1"
)
"""Autovacuum's own rule is a tenth; rarer here, because it comes by and by anyway."""


def analyze_what_has_grown(database: Database) -> list[str]:
    """Have tables analyzed that a fifth was added to. Returns their names. It holds up nobody who reads or writes."""
    if database.engine.dialect.name != "postgresql":
        return []
    with database.read() as connection:
        grown = list(connection.execute(GROWN).scalars())
        for table in grown:
            # Quoted by regclass. Another server may be at it.
            connection.execute(text(f"ANALYZE (SKIP_LOCKED) {table}"))
    return grown
