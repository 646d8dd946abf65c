"""Completes the document that FastAPI makes of an application, when it is first asked for: no start waits for it."""

from typing import Any

import msgspec
from fastapi import FastAPI

from api.openapi.answers import ANSWERS
from api.openapi.contents import ALSO_JSON, CONTENTS, PIECES

SCHEMAS = "#/components/schemas/{name}"
JSON = "application/json"


class DescribedApplication(FastAPI):
    """An application whose document tells what is answered, with what type and of what form.

    Args:
        mlflow_prefixes: below which MLflow's API is.
    """

    def __init__(self, *, mlflow_prefixes: tuple[str, ...], **more: Any) -> None:
        super().__init__(**more)
        self._prefixes = mlflow_prefixes

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _, messages = msgspec.json.schema_components(set(ANSWERS.values()), ref_template=SCHEMAS)
            document["components"]["schemas"] |= messages
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    describe(operation["responses"], f"{method.upper()} {self._below_prefix(path)}")
        return self.openapi_schema or {}

    def _below_prefix(self, path: str) -> str:
        prefix = next((prefix for prefix in self._prefixes if path.startswith(prefix)), "")
        return path.removeprefix(prefix)


def describe(responses: dict[str, Any], route: str) -> None:
    """Complete what one route answers."""
    for status in ("4XX", "5XX"):  # whatever type the route itself has
        [told] = responses[status]["content"].values()
        responses[status]["content"] = {JSON: told}
    if route in ANSWERS:
        responses["200"]["content"] = {JSON: {"schema": {"$ref": SCHEMAS.format(name=ANSWERS[route].__name__)}}}
    if route in ALSO_JSON:
        status, description = ALSO_JSON[route]
        responses[status] = {"description": description, "content": {JSON: {"schema": {}}}}
    if route in CONTENTS:
        statuses, kind = CONTENTS[route]
        for status in statuses:
            described = responses.get(status, {"description": "a part of it"})
            responses[status] = {**described, "content": {kind: {}}}
        if statuses == PIECES:
            responses["416"] = {"description": "there is no such part of it"}
