"""How a request body becomes a value: strict JSON, then a model that ignores what it does not know, as MLflow's does."""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, Strict

NumberText = Annotated[str, Field(pattern=r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|NaN|[-+]?Infinity)$", max_length=400)]
Number = Annotated[float, Strict()] | NumberText
"""A double: a JSON number, or a string where JSON has no number (`"NaN"`, `"Infinity"`). Never `true`."""


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StrictRequest(Request):
    """A request whose body is JSON as RFC 8259 has it: a bare NaN is an error, not 0.0."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            return pydantic_core.from_json(body, allow_inf_nan=False)
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error)[:200], "", 0) from None


class StrictRoute(APIRoute):
    """A route that reads its body through `StrictRequest`. Give it to a router as `route_class`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
