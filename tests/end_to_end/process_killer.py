"""A stack whose processes die at random, whichever they are, and that somebody starts again all the time."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from tests.end_to_end.local_stack import LocalStack

PAUSE_SECONDS = (8.0, 20.0)
"""Between rounds: less, and the stack hardly comes up in between."""
UP_SECONDS = 20.0
"""Between two calls of `up` where nobody was killed: less, and they take from the machine what the stack works with."""


@contextmanager
def dying(stack: LocalStack, chance: random.Random, killed: list[str], rounds: int) -> Iterator[None]:
    """In each round, one process of the stack is killed, or a few together, or all. `killed` gets their command lines."""

    def kill_at_random(over: threading.Event) -> None:
        for _ in range(rounds):
            if over.wait(chance.uniform(*PAUSE_SECONDS)):
                return
            alive = [process for process in stack.processes() if "hanzo_ml.cli" not in " ".join(command_of(process))]
            for process in chance.sample(alive, min(len(alive), chance.choice((1, 1, 2, 3, len(alive))))):
                command = " ".join(command_of(process))[-100:]
                kill(process)
                killed.append(command)

    with beside(kill_at_random):
        yield


@contextmanager
def coming_up(stack: LocalStack, killed: list[str]) -> Iterator[None]:
    """Somebody calls `up` whenever one was killed, until it succeeds: it may fail where what it starts is killed too."""

    def up(over: threading.Event) -> None:
        mended, called = -1, time.monotonic()
        while not over.wait(0.5):
            seen = len(killed)
            if seen == mended and time.monotonic() < called + UP_SECONDS:
                continue
            if stack.hanzo_ml("up", check=False).returncode == 0:
                mended = seen
            called = time.monotonic()

    with beside(up):
        yield


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread, which is to end soon after its event is set."""
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
