"""Query plans of SQLite and PostgreSQL."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import event

from resources.metadata.database import Database


def plans(database: Database, ask: Callable[[], object]) -> str:
    """Return the query plans of all SELECT statements that `ask` executes."""
    asked: list[tuple[str, Any]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def keep(_: Any, __: Any, statement: str, parameters: Any, ___: Any, ____: bool) -> None:
        if statement.startswith("SELECT"):
            asked.append((statement, parameters))

    ask()
    event.remove(database.engine, "before_cursor_execute", keep)
    assert asked
    word = "EXPLAIN QUERY PLAN" if database.engine.dialect.name == "sqlite" else "EXPLAIN"
    with database.read() as connection:
        results = [connection.exec_driver_sql(f"{word} {statement}", parameters).all() for statement, parameters in asked]
    return "\n".join(str(row[-1]) for rows in results for row in rows)
