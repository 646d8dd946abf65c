"""What is told of answers, beside what FastAPI finds out by itself."""

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

import msgspec

from api.openapi.answers import ANSWERS as MLFLOW_ANSWERS
from api.openapi.contents import ALSO_JSON, CONTENTS, PIECES
from api.openapi.v1.answers import ANSWERS as V1_ANSWERS
from api.schemas.mlflow.responses import Message

ANSWERS: dict[str, type[Message] | UnionType] = {**MLFLOW_ANSWERS, **V1_ANSWERS}
JSON = "application/json"


def complete(document: dict[str, Any], mlflow_prefixes: Sequence[str]) -> None:
    """Add to a document of FastAPI's, in its place, what each route answers."""
    schemas, components = schemas_of_answers()
    document["components"]["schemas"] |= components
    for path, operations in document["paths"].items():
        prefix = next((prefix for prefix in mlflow_prefixes if path.startswith(prefix)), "")
        for method, operation in operations.items():
            describe(operation["responses"], f"{method.upper()} {path.removeprefix(prefix)}", schemas)


def schemas_of_answers() -> tuple[dict[type[Message], dict[str, Any]], dict[str, dict[str, Any]]]:
    """The schema of each message that is answered with, and the components that they refer to, by their names."""
    told = (*ANSWERS.values(), *(message for _, _, message in ALSO_JSON.values()))
    messages = list(dict.fromkeys(message for each in told for message in messages_of(each)))
    schemas, components = msgspec.json.schema_components(messages, ref_template="#/components/schemas/{name}")
    return dict(zip(messages, schemas, strict=True)), components


def messages_of(answer: type[Message] | UnionType) -> tuple[type[Message], ...]:
    return get_args(answer) if isinstance(answer, UnionType) else (answer,)


def describe(responses: dict[str, Any], route: str, schemas: dict[type[Message], dict[str, Any]]) -> None:
    """Complete what one route answers."""
    for status in ("4XX", "5XX"):  # whatever type the route itself has
        [told] = responses[status]["content"].values()
        responses[status]["content"] = {JSON: told}
    if route in ANSWERS:
        [success] = (status for status in responses if status.startswith("2"))
        forms = [schemas[message] for message in messages_of(ANSWERS[route])]
        responses[success]["content"] = {JSON: {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
    if route in ALSO_JSON:
        status, description, message = ALSO_JSON[route]
        responses[status] = {"description": description, "content": {JSON: {"schema": schemas[message]}}}
    if route in CONTENTS:
        statuses, kind = CONTENTS[route]
        for status in statuses:
            described = responses.get(status, {"description": "a part of it"})
            responses[status] = {**described, "content": {kind: {}}}
        if statuses == PIECES:
            responses["416"] = {"description": "there is no such part of it"}
