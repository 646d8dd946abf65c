"""Deployments of a gateway: routing of models to backends, and persistent state."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from pydantic import TypeAdapter, ValidationError
from tenacity import AsyncRetrying, retry_if_exception_type

from recipes.contracts.job import BadConfiguration
from recipes.storage.retry import after_pauses
from resources.errors import EngineError, EngineUnavailable, SmokeFailed, UnknownModel
from resources.serving.client import DeployRequest, Served
from resources.serving.llama_process import Backend, LoadedModel, load_model

# The wanted deployments on disk: one JSON file, replaced atomically, which only one gateway may use.

REQUESTS_ADAPTER = TypeAdapter(tuple[DeployRequest, ...])


class DeploymentState:
    """Wanted deployments of one gateway, which locks the state folder until it ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "deployments.json"
        self._lock = lock_state_folder(folder)

    def read(self) -> tuple[DeployRequest, ...]:
        """Read the deployments.

        Raises:
            BadConfiguration: the file was not written by `write`.
        """
        try:
            return REQUESTS_ADAPTER.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except ValidationError:
            raise BadConfiguration(f"{self._file} is broken: delete it to start without deployments") from None

    def write(self, requests: tuple[DeployRequest, ...]) -> None:
        """Replace the file atomically and durably."""
        part = self._file.with_name(self._file.name + ".part")
        with part.open("wb") as file:
            file.write(REQUESTS_ADAPTER.dump_json(requests, indent=1))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)


def lock_state_folder(folder: Path) -> IO[bytes]:
    """Lock the folder for this process; the kernel releases the lock at its end."""
    file = (folder / "gateway.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadConfiguration(f"another gateway uses {folder}: end it, or give another --state-dir") from None
    return file


# Deploy, swap, remove, restore after a restart, recover after a crash.
#
# A swap is one assignment in the event loop: a request is sent either to the old backend or to the new one, and the old
# one is ended only after its last response.

LOAD_WAIT_SECONDS = 60
"""How long a request waits for a model that is being reloaded."""
RECOVERY_PAUSES_SECONDS = (1.0, 5.0, 15.0)
"""Pauses between attempts to reload a deployment; after the last one it is refused."""


@dataclass
class Slot:
    """A wanted deployment; `loaded` is None while it is loading or refused."""

    request: DeployRequest
    loaded: LoadedModel | None = None
    reason: str | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def serve(self, loaded: LoadedModel) -> None:
        self.loaded, self.reason = loaded, None
        self.settled.set()

    def refuse(self, reason: str) -> None:
        self.loaded, self.reason = None, reason
        self.settled.set()

    def unload(self) -> None:
        self.loaded, self.reason = None, None
        self.settled.clear()

    def describe(self) -> Served:
        described_request = self.request.model_dump(include={"name", "version", "deployment", "path", "sha256"})
        if self.loaded is not None:
            return Served(**described_request, status="serving", loaded_at=self.loaded.loaded_at, smoke=self.loaded.smoke)
        return Served(**described_request, status="refused" if self.reason else "loading", reason=self.reason)


class DeploymentTable:
    """All deployments of one gateway."""

    def __init__(self, state: DeploymentState, http: httpx.AsyncClient) -> None:
        self._state = state
        self._http = http
        self._slots: dict[str, Slot] = {}
        # One load at a time: two would compete for memory and cores, and the state file needs a single writer.
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = logging.getLogger("resources.serving")

    def restore(self, requests: tuple[DeployRequest, ...]) -> None:
        """Restore deployments from before a restart in the background; requests wait."""
        for request in requests:
            slot = Slot(request)
            self._slots[request.name] = slot
            self._in_background(self._reload(slot))

    async def deploy(self, request: DeployRequest) -> Served:
        """Serve `request`, replacing what its name served; an error changes nothing."""
        async with self._changing:
            loaded = await load_model(request, self._http)
            slot = Slot(request)
            slot.serve(loaded)
            try:
                self._write_state({**self._slots, request.name: slot})
            except EngineError:
                await loaded.backend.end()
                raise
            previous = self._slots.get(request.name)
            self._slots[request.name] = slot
            self._in_background(self._watch(slot, loaded))
        self._retire(previous)
        self._log.info("serving %s version %d (%s)", request.name, request.version, request.sha256)
        return slot.describe()

    async def remove(self, name: str, deployment: int | None = None) -> None:
        """Stop serving `name` once its requests are answered.

        Raises:
            UnknownModel: it is not deployed, or with another number than `deployment`.
        """
        async with self._changing:
            if name not in self._slots or deployment not in (None, self._slots[name].request.deployment):
                raise UnknownModel(f"no model '{name}' is deployed, or another deployment of it: GET /deployments lists all")
            self._write_state({key: slot for key, slot in self._slots.items() if key != name})
            slot = self._slots.pop(name)
        self._retire(slot)

    def served(self) -> tuple[Served, ...]:
        return tuple(slot.describe() for _, slot in sorted(self._slots.items()))

    async def route(self, model: str | None) -> tuple[Served, Backend]:
        """Return the backend of `model`; None selects the only model.

        Raises:
            UnknownModel: there is no such model, or there are several and `model` is None.
            EngineUnavailable: nothing is deployed, or this model is not served now.
        """
        deadline = asyncio.get_running_loop().time() + LOAD_WAIT_SECONDS
        while True:
            slot = self._slot(model)
            if slot.loaded is not None and slot.loaded.backend.alive:
                return slot.describe(), slot.loaded.backend
            if slot.loaded is not None:
                await asyncio.sleep(0.01)  # it has just died, and its watcher has not noticed yet
                continue
            if slot.settled.is_set():
                raise EngineUnavailable(f"the model '{slot.request.name}' is not served: {slot.reason}")
            try:
                async with asyncio.timeout_at(deadline):
                    await slot.settled.wait()
            except TimeoutError:
                raise EngineUnavailable(f"the model '{slot.request.name}' is still loading: retry later") from None

    async def close(self) -> None:
        """End all backends and tasks; the state is kept for the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.loaded.backend.end() for slot in self._slots.values() if slot.loaded))

    def _slot(self, model: str | None) -> Slot:
        if not self._slots:
            raise EngineUnavailable("no model is deployed: promote a version to production, or POST /deployments")
        if model is None and len(self._slots) == 1:
            return next(iter(self._slots.values()))
        if model is None or model not in self._slots:
            wrong = "the field 'model' is missing" if model is None else f"no model '{model}' is deployed"
            raise UnknownModel(f"{wrong}: deployed are {', '.join(sorted(self._slots))}")
        return self._slots[model]

    def _write_state(self, slots: dict[str, Slot]) -> None:
        try:
            self._state.write(tuple(slot.request for _, slot in sorted(slots.items())))
        except OSError as error:
            raise EngineError(f"cannot write the engine's state ({error.strerror}): make room on its disk") from None

    def _retire(self, slot: Slot | None) -> None:
        """End a replaced backend; requests that wait for it are routed again."""
        if slot is None:
            return
        slot.settled.set()
        if slot.loaded is not None:
            self._in_background(slot.loaded.backend.drain_and_end())

    def _is_wanted(self, slot: Slot) -> bool:
        return self._slots.get(slot.request.name) is slot

    async def _watch(self, slot: Slot, loaded: LoadedModel) -> None:
        """Reload a slot when its backend ends unexpectedly."""
        await loaded.backend.wait_for_end()
        if self._is_wanted(slot):
            self._log.warning("the backend of %s ended by itself: loading it again", slot.request.name)
            slot.unload()
            await self._reload(slot)

    async def _reload(self, slot: Slot) -> None:
        """Verify and reload a slot; refuse a file that is not the registered one."""

        async def load_if_wanted() -> None:
            async with self._changing:
                if self._is_wanted(slot):
                    loaded = await load_model(slot.request, self._http)
                    slot.serve(loaded)
                    self._in_background(self._watch(slot, loaded))

        # Retry, because memory may have been short only temporarily.
        retrying = AsyncRetrying(retry=retry_if_exception_type(SmokeFailed), **after_pauses(*RECOVERY_PAUSES_SECONDS))
        try:
            await retrying(load_if_wanted)
        except EngineError as failure:
            self._log.error("%s is not served: %s", slot.request.name, failure)
            slot.refuse(str(failure))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
