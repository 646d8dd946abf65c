"""A backend as the gateway sees it: started, counted while it answers, drained and ended.

The one place that starts and ends processes. Which backend answers for a model is `resources.serving.deployment_table`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from resources.errors import SmokeFailed

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
        """Start a process on the file and wait until it listens.

        Raises:
            SmokeFailed: llama.cpp does not load the file, or the machine starts no process now.
        """
        command = [sys.executable, "-m", "resources.serving.llama_server"]
        command += [f"--name={name}", "--path", str(path), "--parent", str(os.getpid())]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the gateway, which drains before it ends its backends
            )
        except OSError as error:
            raise SmokeFailed.of(name, f"no process could be started for it ({error.strerror})") from None
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_SECONDS)
            return cls(process, json.loads(line)["address"])
        except BaseException as error:  # a cancelled start leaves no process either
            await terminate_process(process)
            if isinstance(error, TimeoutError | ValueError):
                raise SmokeFailed.of(name, f"llama.cpp does not load {path}") from None
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @contextmanager
    def counting_request(self) -> Iterator[str]:
        """Count one request, so that draining waits for it; gives the address to send it to."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield self.address
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def wait_for_end(self) -> None:
        """Return when the process has ended, for whatever reason."""
        await self._process.wait()

    async def drain_and_end(self) -> None:
        """End the process once the requests that it is answering are done."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), DRAIN_TIMEOUT_SECONDS)
        await self.end()

    async def end(self) -> None:
        """End the process now."""
        await terminate_process(self._process)


async def terminate_process(process: asyncio.subprocess.Process) -> None:
    """Terminate, then kill; returns when the process is gone."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), TERMINATE_TIMEOUT_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
