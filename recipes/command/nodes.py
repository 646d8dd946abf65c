"""The nodes that run a command together, and what they tell each other through the store, which is all that they share.

They meet anew whenever they start. Then the first asks for a state, and all say how far they are with it. Nobody's clock
counts: each takes the files of its folder, and looks again when all have taken theirs. If none has changed by then, all
folders were as they were taken at one moment: that at which the last was. Files of two steps never make one state.
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from recipes.runner import Restart
from recipes.storage.artifact_store import Store

MEETING_SECONDS = 900.0
"""How long the others are waited for at the start, as torchrun waits for them."""
POLL_SECONDS = 1.0
TAKEN, SAME, STILL, PART, MADE, NOT = "taken", "same", "still", "part", "made", "not"
"""What a node says of a state: that it has its files, that they are those of the state before, that they are as they were
when all had theirs, that its part is in the store, that the state is whole; or that there will be none.
"""


@dataclass(frozen=True)
class Asked:
    """A state that the first node asks for; `last` is that of commands that have ended."""

    name: str
    last: bool


class Nodes:
    """One node's view of all.

    Args:
        place: the logical URI below which the states of the job lie.
        rank: 0 is the first, which leads.
    """

    def __init__(self, store: Store, place: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._place = store, f"{place}/nodes"
        self._meeting = ""
        self._asked: Asked | None = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def meet(self, newest: Callable[[], str | None]) -> str | None:
        """Wait for the others; return where the state lies that all go on from, which is the first one's `newest`.

        An answer to a call of an earlier start, or of a node that has been replaced since, is no answer to this one.

        Raises:
            Restart: not all have come.
        """
        mine, until = uuid.uuid4().hex, time.monotonic() + MEETING_SECONDS
        if self.leads:
            self._put("call", mine)
        while time.monotonic() < until:
            if self.leads and (state := self._begin(mine, newest)) is not None:
                return state["uri"]
            if not self.leads and (state := self._answer(mine)) is not None:
                return state["uri"]
            time.sleep(POLL_SECONDS)
        raise Restart(f"of {self.size} nodes not all have come within {MEETING_SECONDS:g} s")

    def _begin(self, call: str, newest: Callable[[], str | None]) -> dict[str, str | None] | None:
        """Of the first: the state, once all the others have answered."""
        answers = {str(rank): self._get(f"{call}/node-{rank}") for rank in range(1, self.size)}
        if None in answers.values():
            return None
        for uri in self._store.list(self._place):  # of those who met before
            if not uri.startswith((f"{self._place}/{call}/", f"{self._place}/call")):
                self._store.delete(uri)
        state = {"uri": newest()}
        self._put(f"{call}/begin", json.dumps({"nodes": answers, "state": state}))
        self._meeting = call
        return state

    def _answer(self, mine: str) -> dict[str, str | None] | None:
        """Of the others: the state, once the first has heard this one's answer."""
        call = self._get("call")
        if call is None:
            return None
        begin = json.loads(self._get(f"{call}/begin") or '{"nodes": {}}')
        if begin["nodes"].get(str(self.rank)) == mine:
            self._meeting = call
            state: dict[str, str | None] = begin["state"]
            return state
        if self._get(f"{call}/node-{self.rank}") != mine:
            self._put(f"{call}/node-{self.rank}", mine)
        return None

    def ask(self, name: str, *, last: bool) -> Asked:
        """Of the first: for a state of this name. What was said of the one before is not needed any more."""
        if self._asked:
            self._store.delete(f"{self._place}/{self._meeting}/said/{self._asked.name}")
        self._asked = Asked(name, last)
        self._put(f"{self._meeting}/asked", json.dumps({"name": name, "last": last}))
        return self._asked

    def asked(self) -> Asked | None:
        """What the first has asked for last."""
        text = self._get(f"{self._meeting}/asked")
        return Asked(**json.loads(text)) if text else None

    def say(self, asked: Asked, word: str, text: str = "") -> None:
        self._put(f"{self._meeting}/said/{asked.name}/{word}-{self.rank}", text)

    def said(self, asked: Asked) -> dict[str, set[int]]:
        """Which nodes have said what."""
        found: dict[str, set[int]] = {}
        for uri in self._store.list(f"{self._place}/{self._meeting}/said/{asked.name}"):
            word, _, rank = uri.rpartition("/")[2].partition("-")
            found.setdefault(word, set()).add(int(rank))
        return found

    def text(self, asked: Asked, word: str, rank: int) -> str:
        return self._store.get_bytes(f"{self._place}/{self._meeting}/said/{asked.name}/{word}-{rank}").decode()

    def _put(self, name: str, text: str) -> None:
        self._store.put_bytes(f"{self._place}/{name}", text.encode())

    def _get(self, name: str) -> str | None:
        try:
            return self._store.get_bytes(f"{self._place}/{name}").decode()
        except FileNotFoundError:
            return None
