"""The key of a job: its id and its program."""

from dataclasses import dataclass
from typing import Protocol

from recipes.contracts.job import Program


class JobKey(Protocol):
    """What identifies a job to a backend. A `Job`, a `JobRecord` and a `JobRef` are such keys."""

    @property
    def id(self) -> str: ...

    @property
    def program(self) -> Program: ...


@dataclass(frozen=True)
class JobRef:
    """A job key, where only the id is at hand. The program is part of it: equal ids of two programs are two jobs."""

    id: str
    program: Program
