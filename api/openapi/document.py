"""Completes the document that FastAPI makes of an application, when it is first asked for: no start waits for it."""

from typing import Any

from fastapi import FastAPI


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
            # The messages are a part of a server's start that it need not wait for, nor hold in memory.
            from api.openapi.descriptions import complete

            complete(super().openapi(), self._prefixes)
        return self.openapi_schema or {}
