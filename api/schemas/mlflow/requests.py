"""Request bodies that several MLflow endpoints share."""

from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from api.errors import SEE_DOCS
from api.strict_json import Body, Number, proto_fields
from resources.errors import invalid
from resources.metadata.field_rules import MetricPoint, metric_point


async def find_run_id(run_id: Annotated[str | None, Query()] = None, run_uuid: Annotated[str | None, Query()] = None) -> str:
    named = run_id or run_uuid
    if not named:
        raise invalid(f"Missing value for required parameter 'run_id'. {SEE_DOCS}")
    return named


RunIdParameter = Annotated[str, Depends(find_run_id)]


Required = Annotated[str, Field(min_length=1)]
"""Text that must be there: in protobuf's JSON an empty text is an absent one."""
RunId = Annotated[Required, Field(validation_alias=AliasChoices("run_id", "run_uuid"))]
"""Old clients send `run_uuid`, new ones both."""
MAX_BATCH_BYTES = 1_000_000
"""Of a log-batch, as MLflow documents it."""
VIEW_NAMES = {"1": "ACTIVE_ONLY", "2": "DELETED_ONLY", "3": "ALL"}
View = Annotated[
    Literal["ACTIVE_ONLY", "DELETED_ONLY", "ALL"],
    BeforeValidator(lambda value: VIEW_NAMES.get(str(value), value)),
]
"""By name, or by number, which protobuf's JSON allows too, also as text: `ViewType.ALL` of MLflow's Python client is one."""


class Message(Body):
    """A body as protobuf's JSON has it: null means absent, and `runId` is `run_id`."""

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in proto_fields(value).items() if given is not None}


class Tag(Message):
    key: str
    value: str = ""


class OfRun(Message):
    run_id: RunId


class MetricBody(Message):
    key: Required
    value: Number
    timestamp: int
    step: int = 0
    model_id: str = ""
    dataset_name: str = ""
    dataset_digest: str = ""

    def point(self, path: str = "") -> MetricPoint:
        of_model = (self.model_id, self.dataset_name, self.dataset_digest)
        return metric_point(self.key, float(self.value), self.step, self.timestamp, path, *of_model)
