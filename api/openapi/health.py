"""The answers of the probes. What makes them is `api.health`."""

from api.schemas.mlflow.responses import Message


class Alive(Message):
    alive: bool


class Ready(Message):
    """`ready` where every part answers."""

    ready: bool
    database: bool
    storage: bool
