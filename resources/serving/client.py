"""HTTP client of the inference engine, and the messages that both exchange."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from resources.errors import BadRequest, ChecksumMismatch, EngineError, EngineUnavailable, SmokeFailed, UnknownModel

DEFAULT_SMOKE_PROMPTS = ("Hello! Who are you?",)


class StrictModel(BaseModel):
    """Immutable model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DeployRequest(StrictModel):
    """A model version to serve as `name`, and smoke prompts that it must answer."""

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
    """Current state of a deployment.

    `sha256` was computed from the file right before it was loaded. `loading`: being verified and loaded after a restart;
    requests wait for it. `serving`: it answers. `refused`: not served, for the given `reason`. `path` is None if several
    replicas have the file.
    """

    name: str
    version: int
    deployment: int = 0
    path: Path | None
    sha256: str
    status: Literal["loading", "serving", "refused"]
    reason: str | None = None
    loaded_at: datetime | None = None
    smoke: tuple[SmokeResult, ...] = ()


class Deployments(StrictModel):
    """Response of `GET /deployments`."""

    deployments: tuple[Served, ...]


class Refusal(StrictModel):
    """Error body of the deployment endpoints: a code, a one-line message, and details."""

    error_code: str
    message: str
    details: dict[str, JsonValue] = Field(default_factory=dict)


if TYPE_CHECKING:
    import httpx

DEPLOY_TIMEOUT_SECONDS = 1800
ANSWER_TIMEOUT_SECONDS = 600
QUERY_TIMEOUT_SECONDS = 10


class EngineClient:
    """Client of the engine at a gateway's URL."""

    def __init__(self, url: str) -> None:
        # Imported lazily: a tenth of the API's start time, and the API calls an engine only occasionally.
        import httpx

        self._url = url.rstrip("/")
        # One client, because creating one reads certificates for 30 ms; no keep-alive, because a restarted gateway has
        # closed the connection.
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def deploy(
        self,
        name: str,
        version: int,
        path: Path,
        sha256: str,
        smoke_prompts: Sequence[str] = DEFAULT_SMOKE_PROMPTS,
        deployment: int = 0,
    ) -> Served:
        """Serve this file as `name`, replacing what `name` served without a failed request.

        Raises:
            ChecksumMismatch: the file is not the registered one; nothing has changed.
            SmokeFailed: the model does not load or does not answer; nothing has changed.
            EngineUnavailable: no engine answers.
        """
        request = DeployRequest(
            name=name,
            version=version,
            deployment=deployment,
            path=path.resolve(),
            sha256=sha256,
            smoke_prompts=tuple(smoke_prompts),
        )
        answer = self._call("POST", "/deployments", DEPLOY_TIMEOUT_SECONDS, request.model_dump(mode="json"))
        return Served.model_validate_json(answer.content)

    def served(self) -> list[Served]:
        """Return all deployments with their current status."""
        answer = self._call("GET", "/deployments", QUERY_TIMEOUT_SECONDS)
        return list(Deployments.model_validate_json(answer.content).deployments)

    def remove(self, name: str, deployment: int | None = None) -> None:
        """Stop serving `name`, if given only this deployment of it.

        Raises:
            UnknownModel: it is not deployed.
        """
        only = "" if deployment is None else f"?deployment={deployment}"
        # Quote again: the name may contain a quoted organization, and the gateway unquotes its path.
        self._call("DELETE", f"/deployments/{quote(name)}{only}", QUERY_TIMEOUT_SECONDS)

    def chat(
        self, model: str, messages: str | Sequence[Mapping[str, str]], max_tokens: int = 128, temperature: float = 0.0
    ) -> str:
        """Return the model's answer to a prompt or a conversation."""
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        body = {"model": model, "messages": conversation, "max_tokens": max_tokens, "temperature": temperature}
        answer = self._call("POST", "/v1/chat/completions", ANSWER_TIMEOUT_SECONDS, body)
        return str(answer.json()["choices"][0]["message"]["content"])

    def _call(self, method: str, path: str, seconds: float, body: dict[str, Any] | None = None) -> "httpx.Response":
        """Send a request. Raises the EngineError that the gateway raised."""
        import httpx

        try:
            answer = self._http.request(method, self._url + path, json=body, timeout=seconds)
        except httpx.ConnectError:
            hint = "start it with python -m resources.serving.gateway"
            raise EngineUnavailable(f"no inference engine answers at {self._url}: {hint}") from None
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"the inference engine at {self._url} did not answer ({type(error).__name__})") from None
        if answer.is_success:
            return answer
        raise parse_error(answer)


def from_refusal(refusal: Refusal) -> EngineError:
    """Return the error that the gateway raised."""
    for error in (BadRequest, UnknownModel, ChecksumMismatch, SmokeFailed, EngineUnavailable):
        if error.kind == refusal.error_code:
            return error(refusal.message, **refusal.details)
    return EngineError(refusal.message, **refusal.details)


def parse_error(answer: "httpx.Response") -> EngineError:
    """Parse the error of a response, in our or in OpenAI's format."""
    try:
        return from_refusal(Refusal.model_validate_json(answer.content))
    except ValidationError:
        pass
    try:
        error = answer.json()["error"]
        return from_refusal(Refusal(error_code=str(error.get("code")), message=str(error["message"])))
    except (ValueError, LookupError, TypeError, AttributeError):
        return EngineError(f"the inference engine answered {answer.status_code}: {answer.text:.200}")
