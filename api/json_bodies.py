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

# How a request body becomes a value: strict JSON, then a model that ignores what it does not know, as MLflow's does.

NumberText = Annotated[str, Field(pattern=r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|NaN|[-+]?Infinity)$", max_length=400)]
Number = Annotated[float, Strict()] | NumberText
"""A double: a JSON number, or a string where JSON has no number (`"NaN"`, `"Infinity"`). Never `true`."""


CAPITAL_LETTER = re.compile("[A-Z]")


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def parse_json(body: bytes) -> Any:
    """The JSON of a body. Old clients encode theirs twice: a text is decoded once more, as in MLflow's own server.

    Raises:
        ValueError, RecursionError: it is none, or has a bare NaN.
    """
    value = pydantic_core.from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    return pydantic_core.from_json(value, allow_inf_nan=False) if isinstance(value, str) else value


def proto_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message by their names in MLflow's protocol: protobuf's JSON spells `run_id` as `runId` too.

    Raises:
        HanzoError: a field is there in both spellings: whoever checks the one must not act on the other.
    """
    fields: dict[str, Any] = {}
    for given, value in message.items():
        name = given if given.islower() else CAPITAL_LETTER.sub(lambda found: f"_{found[0].lower()}", given)
        if name in fields:
            raise invalid(f"Request specifies {name[:100]!r} in both of its spellings; provide only one of them.")
        fields[name] = value
    return fields


def with_proto_names(value: Any) -> Any:
    """The same with all messages in it."""
    if isinstance(value, list):
        return [with_proto_names(each) for each in value]
    return (
        {name: with_proto_names(given) for name, given in proto_fields(value).items()} if isinstance(value, dict) else value
    )


class StrictRequest(Request):
    """A request whose body is JSON as RFC 8259 has it: a bare NaN is an error, not 0.0."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return parse_json(body)
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error)[:200], "", 0) from None

    async def query_in_body(self) -> dict[str, Any]:
        """What a GET request without a query asks in its body, as MLflow's own server takes it too; nothing where it asks
        nothing.
        """
        if not await self.body():
            return {}
        try:
            asked = await self.json()
        except json.JSONDecodeError as error:
            raise invalid(f"Malformed JSON in the request body: {error.msg}") from None
        return asked if isinstance(asked, dict) else {}


def as_query_string(body: Mapping[str, Any]) -> bytes:
    """The same question as a query string."""
    plain = {name: value for name, value in body.items() if value is not None}
    return urlencode({name: query_value(value) for name, value in plain.items()}, doseq=True).encode()


def query_value(value: Any) -> Any:
    if isinstance(value, list):
        return [query_value(each) for each in value]
    return value if isinstance(value, str) else json.dumps(value)


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`. Give it to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if request.method == "GET" and not request.scope["query_string"]:
                strict.scope["query_string"] = as_query_string(await strict.query_in_body())
            return await handle(strict)

        return handle_strictly


# JSON responses that know the type of their body.
#
# An endpoint that returns `TypedResponse[T]` declares its response type by that, to mypy and to the OpenAPI document.

T = TypeVar("T")


class Deleted(TypedDict):
    """`deleted` is what it was called."""

    deleted: str


class TypedResponse(Response, Generic[T]):
    """A response whose body is the JSON of a T."""

    media_type = "application/json"


def json_response(content: T, status_code: int = 200) -> TypedResponse[T]:
    """The JSON of a TypedDict, a dataclass or a Pydantic model, and of what such contain. NaN is an error."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=as_json)
    return TypedResponse(text.encode(), status_code)


def as_json(value: Any) -> Any:
    """A value of a type that `json` does not know as one that it does."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
