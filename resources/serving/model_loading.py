"""From a file to a backend that may serve: checksum, load, smoke prompts. Anything less never sees traffic."""

import asyncio
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from recipes.storage.artifact_store import hash_file
from resources.errors import BadRequest, ChecksumMismatch, SmokeFailed
from resources.serving.backend_process import Backend
from resources.serving.messages import DeployRequest, SmokeResult

SMOKE_TIMEOUT_SECONDS = 120
SMOKE_TOKENS = 16


@dataclass(frozen=True)
class LoadedModel:
    """A backend that has proved itself."""

    backend: Backend
    loaded_at: datetime
    smoke: tuple[SmokeResult, ...]


async def load_model(request: DeployRequest, http: httpx.AsyncClient) -> LoadedModel:
    """Verify, load and warm a model; leaves no process behind when it raises.

    Raises:
        BadRequest: there is no such file, or not any more.
        ChecksumMismatch: the file is not the registered one, or changed while it was loaded (rows P6 and X7).
        SmokeFailed: it does not load, or does not answer every smoke prompt with finite log-probabilities.
    """
    before = await verify_checksum(request)
    backend = await Backend.start(request.name, request.path)
    try:
        await refuse_changed_file(request, before)
        smoke = tuple([await run_smoke_prompt(request, prompt, backend, http) for prompt in request.smoke_prompts])
    except BaseException:
        await backend.end()
        raise
    return LoadedModel(backend=backend, loaded_at=datetime.now(UTC), smoke=smoke)


async def verify_checksum(request: DeployRequest) -> tuple[int, ...]:
    """Hash the file; gives its identity, by which a later change shows."""
    try:
        before = file_identity(request.path)
        found = await asyncio.to_thread(hash_file, request.path)
    except OSError as error:
        raise unreadable_file_error(request.path, error) from None
    if found != request.sha256:
        raise ChecksumMismatch.of(str(request.path), request.sha256, found)
    return before


async def refuse_changed_file(request: DeployRequest, before: tuple[int, ...]) -> None:
    """Raises where the file is not the one that was hashed."""
    try:
        if file_identity(request.path) == before:
            return
        found = await asyncio.to_thread(hash_file, request.path)
    except OSError as error:
        raise unreadable_file_error(request.path, error) from None
    raise ChecksumMismatch.of(f"{request.path} (changed while it was loaded)", request.sha256, found)


def unreadable_file_error(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"cannot read {path} ({error.strerror}): give the path of a GGUF file")


def file_identity(path: Path) -> tuple[int, ...]:
    """Device, inode, size and times of a file: equal as long as nobody writes or replaces it."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


async def run_smoke_prompt(request: DeployRequest, prompt: str, backend: Backend, http: httpx.AsyncClient) -> SmokeResult:
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
        response = await http.post(f"{backend.address}/v1/chat/completions", json=body, timeout=SMOKE_TIMEOUT_SECONDS)
        response.raise_for_status()
        choice = response.json()["choices"][0]
    except httpx.TimeoutException:
        raise SmokeFailed.of(model, f"it gave no answer within {SMOKE_TIMEOUT_SECONDS} seconds", prompt) from None
    except httpx.HTTPStatusError as error:
        raise SmokeFailed.of(model, f"it answered with an error: {error.response.text:.200}", prompt) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise SmokeFailed.of(model, f"it broke off its answer ({type(error).__name__})", prompt) from None
    if reason := find_answer_problem(choice):
        raise SmokeFailed.of(model, reason, prompt)
    return SmokeResult(prompt=prompt, answer=answer_text(choice), seconds=round(time.monotonic() - started, 3))


def find_answer_problem(choice: dict[str, Any]) -> str | None:
    """Why an answer does not count, None when it does. llama.cpp writes a logarithm that is not finite as null."""
    tokens = (choice.get("logprobs") or {}).get("content") or []
    values = [token.get("logprob") for token in tokens]
    if any(not isinstance(value, int | float) or not math.isfinite(value) for value in values):
        return "its log-probabilities are not finite numbers"
    if not answer_text(choice).strip() or not values:
        return "it gave an empty answer"
    return None


def answer_text(choice: dict[str, Any]) -> str:
    """What the model said, thoughts included."""
    message = choice["message"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")
