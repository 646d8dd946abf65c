"""What crosses the border of the engine: the body of a deployment, and what is truly served."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

DEFAULT_SMOKE_PROMPTS = ("Hello! Who are you?",)


class StrictModel(BaseModel):
    """Immutable, and a key nobody knows is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DeployRequest(StrictModel):
    """A model version to serve under `name`, and the prompts that it has to answer first."""

    name: str = Field(
        pattern=r"^([A-Za-z0-9._%~-]{1,128}/)?[^/\x00]{1,250}$",
        description="as the registry has it, with its organization's in front or alone",
    )
    version: int = Field(ge=1)
    deployment: int = Field(0, description="of the registry: who takes this one out of service names it")
    path: Path = Field(description="absolute path of the GGUF file on the engine's machine")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the file, as the registry recorded it")
    smoke_prompts: tuple[str, ...] = Field(DEFAULT_SMOKE_PROMPTS, min_length=1)


class SmokeResult(StrictModel):
    """A smoke prompt and what the model answered; its log-probabilities were finite numbers."""

    prompt: str
    answer: str
    seconds: float


class Served(StrictModel):
    """A deployment as it is now. `sha256` was computed from the file right before it was loaded.

    `loading`: wanted, and being verified and loaded after a restart; requests wait for it. `serving`: it answers.
    `refused`: wanted, not served, for the `reason` given.
    """

    name: str
    version: int
    path: Path
    sha256: str
    status: Literal["loading", "serving", "refused"]
    reason: str | None = None
    loaded_at: datetime | None = None
    smoke: tuple[SmokeResult, ...] = ()


class Deployments(StrictModel):
    """Answer of `GET /deployments`."""

    deployments: tuple[Served, ...]


class Refusal(StrictModel):
    """Body of every error of the deployment endpoints: a code, one line for the user, and the facts behind it."""

    error_code: str
    message: str
    details: dict[str, JsonValue] = Field(default_factory=dict)
