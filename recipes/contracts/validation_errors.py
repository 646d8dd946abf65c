"""What is said of a value that does not fit its type: the first problem, in one line."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from recipes.known_keys import known_keys
from recipes.spelling import unknown_key

KINDS = {
    "model_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "string_type": "must be a text: put it in quotes",
}
"""What to say instead of Pydantic's words, which name classes of ours, or of Python, and not what to do."""


def first_of(error: ValidationError) -> ErrorDetails:
    """Its first problem. A key that nobody knows comes before one that is missing: it may be that one, misspelled."""
    first, *others = error.errors()
    unknown = (problem for problem in others if problem["type"] == "extra_forbidden")
    return next(unknown, first) if first["type"] == "missing" else first


def first_problem(error: ValidationError, kind: Any) -> str:
    """The first problem of a validation error as one line: where, what is wrong, and what was given for that type."""
    problem = first_of(error)
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return unknown_key(where, known_keys(kind, problem["loc"][:-1]))
    if problem["type"] == "missing":
        return f"'{where}' is missing: add it"
    what = KINDS.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    # What is wrong between keys says of itself which they are.
    return f"'{where}': {what} (given: {problem['input']!r:.80})" if where else what
