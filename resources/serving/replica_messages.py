"""Messages between the API and the replicas of an engine that pulls."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from resources.serving.client import SmokeResult

MAX_REASON_LENGTH = 2000


class Message(BaseModel):
    """Immutable. Unknown keys are ignored, because versions differ during an upgrade."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class WantedDeployment(Message):
    """A version to serve.

    A name may have two: the one that serves, and its successor with a higher `id`.
    """

    id: int
    attempt: int
    name: str
    version: int
    sha256: str
    size_bytes: int
    smoke_prompts: tuple[str, ...]


class WantedDeployments(Message):
    """Response of `GET /v1/engine/deployments`."""

    deployments: tuple[WantedDeployment, ...]


class DeploymentReport(Message):
    """The state of one deployment in one replica.

    `serving`: it answers; `sha256` was computed from the file before it was loaded. `loading`: `reason` states the progress.
    `failed`: `reason` and `error_code` say why; another version may serve under its name.
    """

    deployment: int
    attempt: int
    name: str
    version: int
    sha256: str
    status: Literal["loading", "serving", "failed"]
    reason: Annotated[str, Field(max_length=MAX_REASON_LENGTH)] = ""
    error_code: str = ""
    loaded_at: datetime | None = None
    smoke: tuple[SmokeResult, ...] = ()


class ReplicaReport(Message):
    """Body of `PUT /v1/engine/replicas/{replica}`."""

    ready: bool
    deployments: tuple[DeploymentReport, ...]
