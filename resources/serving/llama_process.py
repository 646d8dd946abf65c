"""Model processes of the engine: verify checksum, load, smoke test, drain, terminate."""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import httpx

from recipes.extras import SERVE, lacking
from recipes.storage.artifact_store import hash_file
from resources.errors import BadRequest, ChecksumMismatch, SmokeFailed
from resources.serving.client import DeployRequest, SmokeResult

# The only place that starts and ends backend processes. Routing is in `resources.serving.deployment_table`.

START_TIMEOUT_SECONDS = 600
DRAIN_TIMEOUT_SECONDS = 600
TERMINATE_TIMEOUT_SECONDS = 5


class Backend:
    """One running backend process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.address = address
        self._process = process
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(cls, name: str, path: Path) -> Self:
        """Start a process for the file and wait until it listens.

        Raises:
            SmokeFailed: llama.cpp is not installed or does not load the file, or no process can be started.
        """
        if problem := lacking("the engine", SERVE):
            raise SmokeFailed.with_details(name, problem)
        command = [sys.executable, "-m", "resources.serving.llama_server"]
        command += [f"--name={name}", "--path", str(path), "--parent", str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the gateway, which drains before it ends its backends
            )
        except OSError as error:
            raise SmokeFailed.with_details(name, f"no process could be started for it ({error.strerror})") from None
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_SECONDS)
            return cls(process, json.loads(line)["address"])
        except BaseException as error:  # a cancelled start leaves no process either
            await terminate_process(process)
            if isinstance(error, TimeoutError | ValueError):
                raise SmokeFailed.with_details(name, f"llama.cpp does not load {path}") from None
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @contextmanager
    def counting_request(self) -> Iterator[str]:
        """Count one request, so that draining waits for it; yield its address."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield self.address
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def wait_for_end(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    async def drain_and_end(self) -> None:
        """End the process once its requests in flight are answered."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), DRAIN_TIMEOUT_SECONDS)
        await self.end()

    async def end(self) -> None:
        """End the process now."""
        await terminate_process(self._process)


async def terminate_process(process: asyncio.subprocess.Process) -> None:
    """Terminate, then kill a process; return when it is gone."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), TERMINATE_TIMEOUT_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# A backend gets traffic only after checksum, load and smoke prompts have succeeded.

SMOKE_TIMEOUT_SECONDS = 120
SMOKE_TOKENS = 16


@dataclass(frozen=True)
class LoadedModel:
    """A backend that has passed its smoke test."""

    backend: Backend
    loaded_at: datetime
    smoke: tuple[SmokeResult, ...]


async def load_model(request: DeployRequest, http: httpx.AsyncClient) -> LoadedModel:
    """Verify, load and warm up a model; an error leaves no process behind.

    Raises:
        BadRequest: the file does not exist or cannot be read.
        ChecksumMismatch: the file is not the registered one, or changed while it was loaded.
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
    """Verify the file's hash; return its identity, to detect later changes."""
    try:
        before = file_identity(request.path)
        found = await asyncio.to_thread(hash_file, request.path)
    except OSError as error:
        raise unreadable_file_error(request.path, error) from None
    if found != request.sha256:
        raise ChecksumMismatch.with_details(str(request.path), request.sha256, found)
    return before


async def refuse_changed_file(request: DeployRequest, before: tuple[int, ...]) -> None:
    """Raise ChecksumMismatch if the file has changed since it was hashed."""
    try:
        if file_identity(request.path) == before:
            return
        found = await asyncio.to_thread(hash_file, request.path)
    except OSError as error:
        raise unreadable_file_error(request.path, error) from None
    raise ChecksumMismatch.with_details(f"{request.path} (changed while it was loaded)", request.sha256, found)


def unreadable_file_error(path: Path, error: OSError) -> BadRequest:
    return BadRequest(f"cannot read {path} ({error.strerror}): give the path of a GGUF file")


def file_identity(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and times of a file, which change if it is modified."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


async def run_smoke_prompt(request: DeployRequest, prompt: str, backend: Backend, http: httpx.AsyncClient) -> SmokeResult:
    """Send one smoke prompt; raise SmokeFailed with the reason if it fails."""
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
        raise SmokeFailed.with_details(model, f"it gave no answer within {SMOKE_TIMEOUT_SECONDS} seconds", prompt) from None
    except httpx.HTTPStatusError as error:
        raise SmokeFailed.with_details(model, f"it answered with an error: {error.response.text:.200}", prompt) from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise SmokeFailed.with_details(model, f"its answer was interrupted ({type(error).__name__})", prompt) from None
    if reason := find_answer_problem(choice):
        raise SmokeFailed.with_details(model, reason, prompt)
    return SmokeResult(prompt=prompt, answer=answer_text(choice), seconds=round(time.monotonic() - started, 3))


def find_answer_problem(choice: dict[str, Any]) -> str | None:
    """Return why an answer is invalid, None if it is valid.

    llama.cpp writes non-finite log-probabilities as null.
    """
    tokens = (choice.get("logprobs") or {}).get("content") or []
    values = [token.get("logprob") for token in tokens]
    if any(not isinstance(value, int | float) or not math.isfinite(value) for value in values):
        return "its log-probabilities are not finite numbers"
    if not answer_text(choice).strip() or not values:
        return "it gave an empty answer"
    return None


def answer_text(choice: dict[str, Any]) -> str:
    """Return the model's text, including its reasoning."""
    message = choice["message"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")
