"""Kill random processes of a stack while another thread restarts it."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from tests.end_to_end.local_stack import LocalStack

PAUSE_SECONDS = (8.0, 20.0)
"""Between rounds: with less the stack hardly starts in between."""
UP_SECONDS = 20.0
"""Between two calls of `up` without a kill: with less they take processor time from the stack."""


@contextmanager
def dying(stack: LocalStack, chance: random.Random, killed: list[str], rounds: int) -> Iterator[None]:
    """Kill one process of the stack, a few, or all in each round.

    `killed` gets their command lines.
    """

    def kill_at_random(over: threading.Event) -> None:
        for _ in range(rounds):
            if over.wait(chance.uniform(*PAUSE_SECONDS)):
                return
            alive = [process for process in stack.processes() if "hanzo_ml.cli" not in " ".join(command_of(process))]
            for process in chance.sample(alive, min(len(alive), chance.choice((1, 1, 2, 3, len(alive))))):
                command = " ".join(command_of(process))[-100:]
                kill(process)
                killed.append(command)

    with background_thread(kill_at_random):
        yield


@contextmanager
def coming_up(stack: LocalStack, killed: list[str]) -> Iterator[None]:
    """Call `up` after each kill until it succeeds.

    It may fail when a process that it starts is killed too.
    """

    def up(over: threading.Event) -> None:
        mended, called = -1, time.monotonic()
        while not over.wait(0.5):
            seen = len(killed)
            if seen == mended and time.monotonic() < called + UP_SECONDS:
                continue
            if stack.hanzo_ml("up", check=False).returncode == 0:
                mended = seen
            called = time.monotonic()

    with background_thread(up):
        yield


@contextmanager
def background_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread, which ends soon after its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
