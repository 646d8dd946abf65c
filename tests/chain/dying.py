"""A stack whose processes die at random, whichever they are, and that somebody starts again all the time."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from tests.chain.local_stack import LocalStack

PAUSE_SECONDS = (8.0, 20.0)
"""Between rounds: less, and the stack hardly comes up in between."""
UP_SECONDS = 4.0
"""Between two calls of `up`: less, and they take half of the machine from what they are to bring up."""


@contextmanager
def dying(stack: LocalStack, chance: random.Random, killed: list[str], rounds: int) -> Iterator[None]:
    """In each round, one process of the stack is killed, or a few together, or all. `killed` gets their command lines."""

    def kill_at_random(over: threading.Event) -> None:
        for _ in range(rounds):
            if over.wait(chance.uniform(*PAUSE_SECONDS)):
                return
            alive = [process for process in stack.processes() if "hanzo_ml.cli" not in " ".join(command_of(process))]
            for process in chance.sample(alive, min(len(alive), chance.choice((1, 1, 2, 3, len(alive))))):
                killed.append(" ".join(command_of(process))[-100:])
                kill(process)

    with beside(kill_at_random):
        yield


@contextmanager
def coming_up(stack: LocalStack) -> Iterator[None]:
    """Somebody calls `up` again and again; it may fail where what it starts is killed."""

    def up(over: threading.Event) -> None:
        while not over.wait(UP_SECONDS):
            stack.hanzo_ml("up", check=False)

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
