"""Strict JSON request bodies, and typed JSON responses."""

import codecs
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import urlencode

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, Strict
from typing_extensions import TypedDict

from resources.errors import invalid

# Parse request bodies: strict JSON, then a model that ignores unknown fields, as MLflow does.

NumberText = Annotated[str, Field(pattern=r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|NaN|[-+]?Infinity)$", max_length=400)]
Number = Annotated[float, Strict()] | NumberText
"""A double: a JSON number, or a string where JSON has no number (`"NaN"`, `"Infinity"`). Never `true`."""


CAPITAL_LETTER = re.compile("[A-Z]")


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def parse_json(body: bytes) -> Any:
    """Parse the JSON of a body.

    Old clients encode theirs twice: a string is decoded once more, as in MLflow's own server.

    Raises:
        ValueError, RecursionError: the body is not JSON, or contains a bare NaN.
    """
    value = pydantic_core.from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    return pydantic_core.from_json(value, allow_inf_nan=False) if isinstance(value, str) else value


def proto_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's fields by their protocol names: protobuf's JSON also allows `runId`.

    Raises:
        HanzoError: a field occurs in both spellings, so that a check could read one and the endpoint the other.
    """
    fields: dict[str, Any] = {}
    for given, value in message.items():
        name = given if given.islower() else CAPITAL_LETTER.sub(lambda found: f"_{found[0].lower()}", given)
        if name in fields:
            raise invalid(f"Request specifies {name[:100]!r} in both of its spellings; provide only one of them.")
        fields[name] = value
    return fields


def with_proto_names(value: Any) -> Any:
    """Convert the field names of a JSON value at every depth."""
    if isinstance(value, list):
        return [with_proto_names(each) for each in value]
    return (
        {name: with_proto_names(given) for name, given in proto_fields(value).items()} if isinstance(value, dict) else value
    )


class StrictRequest(Request):
    """A request with a strict JSON body (RFC 8259): a bare NaN is an error."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return parse_json(body)
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error)[:200], "", 0) from None

    async def query_in_body(self) -> dict[str, Any]:
        """Return the parameters in a GET request's body; empty without one.

        MLflow's own server accepts them there too.
        """
        if not await self.body():
            return {}
        try:
            asked = await self.json()
        except json.JSONDecodeError as error:
            raise invalid(f"Malformed JSON in the request body: {error.msg}") from None
        return asked if isinstance(asked, dict) else {}


def as_query_string(body: Mapping[str, Any]) -> bytes:
    """Encode parameters of a body as a query string."""
    plain = {name: value for name, value in body.items() if value is not None}
    return urlencode({name: query_value(value) for name, value in plain.items()}, doseq=True).encode()


def query_value(value: Any) -> Any:
    if isinstance(value, list):
        return [query_value(each) for each in value]
    return value if isinstance(value, str) else json.dumps(value)


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`. Pass it to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if request.method == "GET" and not request.scope["query_string"]:
                strict.scope["query_string"] = as_query_string(await strict.query_in_body())
            return await handle(strict)

        return handle_strictly


# Typed JSON responses.
#
# Returning `TypedResponse[T]` declares an endpoint's response type to mypy and to the OpenAPI document.

T = TypeVar("T")


class Deleted(TypedDict):
    """`deleted` is the name or id of the deleted object."""

    deleted: str


class TypedResponse(Response, Generic[T]):
    """A JSON response with a body of type T."""

    media_type = "application/json"


def json_response(content: T, status_code: int = 200) -> TypedResponse[T]:
    """Encode nested TypedDicts, dataclasses and Pydantic models as JSON. NaN is an error."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=as_json)
    return TypedResponse(text.encode(), status_code)


def as_json(value: Any) -> Any:
    """Convert a value of a type that `json` does not support."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
