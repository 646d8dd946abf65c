"""Our run statuses and MLflow's (row F12), and filters on status translated from MLflow's words into ours."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator

from resources.errors import invalid
from resources.metadata.filters.filter_language import Condition

TO_MLFLOW = {
    "queued": "SCHEDULED",
    "running": "RUNNING",
    "completed": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
FROM_MLFLOW = {theirs: ours for ours, theirs in TO_MLFLOW.items()}

NUMBERS = {"1": "RUNNING", "2": "SCHEDULED", "3": "FINISHED", "4": "FAILED", "5": "KILLED"}
Status = Annotated[str, BeforeValidator(lambda value: NUMBERS.get(str(value), value))]
"""By name, or by number, which protobuf's JSON allows too, also as text."""


def our_status(theirs: str) -> str:
    if theirs not in FROM_MLFLOW:
        raise invalid(f"Invalid value {theirs!r:.60} for parameter 'status' supplied: use one of {', '.join(FROM_MLFLOW)}")
    return FROM_MLFLOW[theirs]


def translate(conditions: Iterable[Condition]) -> list[Condition]:
    """Conditions on status, whatever their comparator, as the list of our statuses that they let through."""
    return [
        replace(
            condition,
            operator="IN",
            value=tuple(ours for ours, theirs in TO_MLFLOW.items() if holds(condition, theirs)),
        )
        if (condition.entity, condition.key) == ("attribute", "status")
        else condition
        for condition in conditions
    ]


def holds(condition: Condition, theirs: str) -> bool:
    """Whether a condition lets one of MLflow's statuses through."""
    value = condition.value
    if isinstance(value, tuple):
        return (theirs in value) == (condition.operator == "IN")
    if condition.operator in ("=", "!="):
        return (theirs == value) == (condition.operator == "=")
    # A hundred '%' in a row have as many ways to share the word as there are stars: the server would look at all of them.
    once = re.sub("%+", "%", str(value))
    pattern = re.escape(once).replace("%", ".*").replace("_", ".")
    flags = re.IGNORECASE | re.DOTALL if condition.operator == "ILIKE" else re.DOTALL
    return re.fullmatch(pattern, theirs, flags) is not None
