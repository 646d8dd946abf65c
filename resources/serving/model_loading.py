"""From a file to a backend that may serve: checksum, load, smoke prompts. Anything less never sees traffic."""

import asyncio
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from recipes.storage.artifact_store import sha256_of
from resources.errors import BadRequest, ChecksumMismatch, SmokeFailed
from resources.serving.backend_process import Backend
from resources.serving.messages import DeployRequest, SmokeResult

SMOKE_SECONDS = 120
SMOKE_TOKENS = 16


@dataclass(frozen=True)
class Loaded:
    """A backend that has proved itself."""

    backend: Backend
    loaded_at: datetime
    smoke: tuple[SmokeResult, ...]


async def load(request: DeployRequest, http: httpx.AsyncClient) -> Loaded:
    """Verify, load and warm a model; leaves no process behind when it raises.

    Raises:
        BadRequest: there is no such file, or not any more.
        ChecksumMismatch: the file is not the registered one, or changed while it was loaded (rows P6 and X7).
        SmokeFailed: it does not load, or does not answer every smoke prompt with finite log-probabilities.
    """
    before = await verify(request)
    backend = await Backend.start(request.name, request.path)
    try:
        await refuse_changed(request, before)
        smoke = tuple([await answer(request, prompt, backend, http) for prompt in request.smoke_prompts])
    except BaseException:
        await backend.end()
        raise
    return Loaded(backend=backend, loaded_at=datetime.now(UTC), smoke=smoke)


async def verify(request: DeployRequest) -> tuple[int, ...]:
    """Hash the file; gives its identity, by which a later change shows."""
    try:
        before = identity(request.path)
        found = await asyncio.to_thread(sha256_of, request.path)
    except OSError as error:
        raise unreadable(request.path, error) from None
    if found != request.sha256:
        raise ChecksumMismatch.of(str(request.path), request.sha256, found)
    return before


async def refuse_changed(request: DeployRequest, before: tuple[int, ...]) -> None:
    """Raises where the file is not the one that was hashed."""
    try:
        if identity(request.path) == before:
            return
        found = await asyncio.to_thread(sha256_of, request.path)
    except OSError as error:
        raise unreadable(request.path, error) from None
    raise ChecksumMismatch.of(f"{request.path} (changed while it was loaded)", request.sha256, found)


def unreadable(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"cannot read {path} ({error.strerror}): give the path of a GGUF file")


def identity(path: Path) -> tuple[int, ...]:
    """Device, inode, size and times of a file: equal as long as nobody writes or replaces it."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


async def answer(request: DeployRequest, prompt: str, backend: Backend, http: httpx.AsyncClient) -> SmokeResult:
    """Ask one smoke prompt; raises SmokeFailed with the reason."""
    model = f"{request.name} version {request.version}"
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": SMOKE_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    started = time.monotonic()
    try:
        response = await http.post(f"{backend.address}/v1/chat/completions", json=body, timeout=SMOKE_SECONDS)
        response.raise_for_status()
        choice = response.json()["choices"][0]
    except httpx.TimeoutException:
        raise SmokeFailed.of(model, f"it gave no answer within {SMOKE_SECONDS} seconds", prompt) from None
    except httpx.HTTPStatusError as error:
        raise SmokeFailed.of(model, f"it answered with an error: {error.response.text:.200}", prompt) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise SmokeFailed.of(model, f"it broke off its answer ({type(error).__name__})", prompt) from None
    if reason := weakness(choice):
        raise SmokeFailed.of(model, reason, prompt)
    return SmokeResult(prompt=prompt, answer=text_of(choice), seconds=round(time.monotonic() - started, 3))


def weakness(choice: dict[str, Any]) -> str | None:
    """Why an answer does not count, None when it does. llama.cpp writes a logarithm that is not finite as null."""
    tokens = (choice.get("logprobs") or {}).get("content") or []
    values = [token.get("logprob") for token in tokens]
    if any(not isinstance(value, int | float) or not math.isfinite(value) for value in values):
        return "its log-probabilities are not finite numbers"
    if not text_of(choice).strip() or not values:
        return "it gave an empty answer"
    return None


def text_of(choice: dict[str, Any]) -> str:
    """What the model said, thoughts included."""
    message = choice["message"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")
