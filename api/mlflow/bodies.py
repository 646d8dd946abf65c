"""Request bodies that several MLflow endpoints share."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from api.requests import Body, Number
from resources.metadata.tracking_rules import MetricPoint, metric_point

RunId = Annotated[str, Field(validation_alias=AliasChoices("run_id", "run_uuid"))]
"""Old clients send `run_uuid`, new ones both."""
View = Literal["ACTIVE_ONLY", "DELETED_ONLY", "ALL"]


class Tag(Body):
    key: str
    value: str = ""


class MetricBody(Body):
    key: str
    value: Number
    timestamp: int
    step: int = 0

    def point(self, path: str = "") -> MetricPoint:
        return metric_point(self.key, float(self.value), self.step, self.timestamp, path)
