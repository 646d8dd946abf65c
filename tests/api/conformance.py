"""Check every response that a test gets against the server's OpenAPI document.

Compares status, content type and body.
"""

import json
import re
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
from fastapi import FastAPI


def documented(template: str) -> str:
    """Return the path that documents a route.

    A route with two paths is documented under the first.
    """
    path = re.sub(r"\{(\w+):\w+\}", r"{\1}", template)
    return path.removeprefix("/api") if path.startswith("/api/v1/") else path


def named_schemas(document: dict[str, Any], part: Any) -> set[str]:
    """Return the components that a part of a document refers to, directly or indirectly."""
    found: set[str] = set()
    waiting = [part]
    while waiting:
        text = json.dumps(waiting.pop())
        for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)) - found:
            found.add(name)
            waiting.append(document["components"]["schemas"][name])
    return found


def operations_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for operations in document["paths"].values() for operation in operations.values()]


class Conformance:
    """Compares responses with an application's document."""

    def __init__(self, app: FastAPI) -> None:
        self._routes = app.state.routes
        self._document = app.openapi()

    def check(self, answer: httpx.Response) -> None:
        """Raise an AssertionError for a response that contradicts the document.

        An event hook of a client.
        """
        method, path = answer.request.method, answer.request.url.path
        match = self._routes.match(method, path)
        operation = self._operation(method, match.route.template) if match else None
        if operation is None:  # not in the document
            return
        status, responses = str(answer.status_code), operation["responses"]
        declared = responses.get(status) or responses.get(f"{status[0]}XX")
        what = f"{method} {match.route.template}: {status}"
        assert declared is not None, f"{what} is not declared"
        kind = answer.headers.get("content-type", "").partition(";")[0]
        contents = declared.get("content", {})
        assert kind in contents or "*/*" in contents or not (kind or contents), f"{what} {kind} is not declared"
        schema = contents.get(kind, {}).get("schema")
        if schema and kind == "application/json":
            answer.read()
            problem = next(self._validator(json.dumps(schema)).iter_errors(answer.json()), None)
            assert problem is None, f"{what}: {problem}"

    def _operation(self, method: str, template: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._document["paths"].get(documented(template), {}).get(method.lower())
        return found

    @cache  # noqa: B019  (one for each application of a session)
    def _validator(self, schema: str) -> jsonschema_rs.Validator:
        return jsonschema_rs.validator_for({**json.loads(schema), "components": self._document["components"]})
