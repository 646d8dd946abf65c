"""Publishes what a command leaves on several nodes, as one state of all their parts (rows H2, I1, I3, I15).

A state is there when each node's part is, and all parts are of one moment (`recipes.command.nodes`): of shards of two steps
no script goes on. What a node alone has newer is not published, as that of a machine that died.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from recipes.command.look import Stamp, changed
from recipes.command.nodes import MADE, NOT, PART, POLL_SECONDS, SAME, STILL, TAKEN, Asked, Nodes
from recipes.command.parts import bring_part, is_taken, prefix_of, whole_of
from recipes.command.snapshot_publisher import PATIENCE_SECONDS, Ended, Moved, Saving, every
from recipes.command.snapshot_store import States
from recipes.runner import Restart, say
from recipes.storage.artifact_store import BrokenArtifact
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact, Manifest

LAST_SECONDS = 120.0
"""How long the others' ends are waited for by a command that has failed, or was killed or asked to stop."""
SENDING_SECONDS = 3600.0
"""How long the others' parts are, while those are sent."""


class Apart(Exception):
    """The nodes did not come together for a state."""


class Anew(Exception):
    """The first has given up what it asked for, and asks for another state."""


class Unchanged(Exception):
    """On all nodes lies what the state before is of."""


class Together(Saving):
    """`Saving` of one of several nodes.

    Args:
        borrowed: what lies in the folder of other nodes', as it was brought.
    """

    is_alone = False

    def __init__(
        self,
        folder: Path,
        states: States,
        made_of: Manifest,
        interval: float,
        account: Callable[[], None],
        nodes: Nodes,
        borrowed: Mapping[str, Stamp],
    ) -> None:
        super().__init__(folder, states, made_of, interval, account)
        self._nodes = nodes
        self._borrowed = borrowed
        self._asked = Asked("", last=False)
        self._made: Artifact | None = None
        self._restless: frozenset[str] = frozenset()
        """Files that are written to all the time, such as a log: they are taken as they are, and only by them is no state
        told from the next.
        """
        self._hurries_since: float | None = None

    def look_once(self) -> None:
        at = time.monotonic()
        if at >= self._accounts_at:
            self.account()
            self._accounts_at = at + self.interval
        if self._nodes.leads and at < self._due:
            return
        asked = self._ask(last=False) if self._nodes.leads else self._nodes.asked()
        if asked is None or asked.last or (asked == self._asked and not self._nodes.leads):
            return
        with suppress(Unchanged, Anew):
            self._take_part(asked, self._stand_still)
        self._due = at + self.interval

    def _pause(self) -> float:
        return super()._pause() if self._nodes.leads else every(self.interval)

    def _publish(self) -> Artifact | None:
        copied: frozenset[str] = frozenset()
        while True:
            asked = self._ask(last=True) if self._nodes.leads else self._last_asked()
            try:
                return self._take_part(asked, self._look, copied)
            except Unchanged:
                return self._made
            except Moved as moved:
                copied |= moved.rewritten
            except Anew:
                continue

    def _ask(self, *, last: bool) -> Asked:
        return self._nodes.ask(self.states.next_name(uuid.uuid4().hex), last=last)

    def _last_asked(self) -> Asked:
        """What the first asks for when its command has ended as well."""
        while (asked := self._nodes.asked()) is None or not asked.last or asked == self._asked:
            self._stay_for("the first node")
            time.sleep(POLL_SECONDS)
        return asked

    def _take_part(
        self, asked: Asked, look: Callable[[], Mapping[str, Stamp]], copied: frozenset[str] = frozenset()
    ) -> Artifact | None:
        self._asked = asked
        try:
            seen = look()
            copied |= self.rewritten | self._restless
            as_it_is = asked.last or bool(self._restless)
            self._made = self._save(seen, copied, as_it_is=as_it_is, may_end=not asked.last)
        except BaseException:
            with suppress(StoreUnavailable):
                self._nodes.say(asked, NOT)
            raise
        self._saved = seen
        return self._made

    def _stand_still(self) -> Mapping[str, Stamp]:
        """What lies there when two looks find the same, but for what never stands still."""
        until, before = time.monotonic() + PATIENCE_SECONDS / 2, self._look()
        self._restless = frozenset()
        while True:
            if self._ended.wait(every(self.interval)):
                raise Ended
            now = self._look()
            if self._quiet(now) == self._quiet(before):
                return now
            if time.monotonic() > until:
                self._restless |= changed(before, now)
            before = now

    def _quiet(self, seen: Mapping[str, Stamp]) -> dict[str, Stamp]:
        return {path: stamp for path, stamp in seen.items() if path not in self._restless}

    def _look(self) -> dict[str, Stamp]:
        """What is this node's own."""
        found = super()._look()
        if self._nodes.leads and (taken := sorted(path for path in found if is_taken(path))):
            self._say_once(f"checkpoints: {taken[0]} is not published: other nodes' files have such names, use another")
        return {path: stamp for path, stamp in found.items() if self._is_own(path, stamp)}

    def _is_own(self, path: str, stamp: Stamp) -> bool:
        return self._borrowed.get(path) != stamp and not (self._nodes.leads and is_taken(path))

    def _agree(self, seen: Mapping[str, Stamp]) -> None:
        asked = self._asked
        if seen == self._saved:
            self._nodes.say(asked, SAME)
        self._nodes.say(asked, TAKEN)
        said = self._wait_for(TAKEN)
        if len(said.get(SAME, ())) == self._nodes.size:
            raise Unchanged
        if not asked.last and self._quiet(self._look()) != self._quiet(seen):
            raise Moved
        self._nodes.say(asked, STILL)
        self._wait_for(STILL)

    def _put(self, scratch: Path, manifest: Manifest, sent: Callable[[str], None]) -> Artifact:
        asked, rank = self._asked, self._nodes.rank
        uri = f"{self.states.place}/{asked.name}"
        self.states.send(f"{uri}/{prefix_of(rank)}".rstrip("/"), scratch, manifest, sent)
        self._nodes.say(asked, PART, manifest.to_bytes().decode())
        if not self._nodes.leads:
            self._wait_for(MADE, of=1)
            made = self.states.store.find(uri)
            assert made is not None
            return made
        self._wait_for(PART)
        parts = [Manifest.model_validate_json(self._nodes.text(asked, PART, node)) for node in range(self._nodes.size)]
        made = self.states.complete(asked.name, whole_of(parts, self.made_of))
        self._nodes.say(asked, MADE)
        return made

    def _make_room(self, error: StoreFull) -> None:
        if not self._nodes.leads:  # what lies there is of all nodes, and what the first asks for next it makes room for
            raise error
        super()._make_room(error)

    def _wait_for(self, word: str, of: int | None = None) -> dict[str, set[int]]:
        """Until all nodes have said it.

        Raises:
            Ended: the command has, and what is asked for is of one that runs.
            Anew: the first asks for another.
            Apart: a node does not come, or cannot.
            StoreUnavailable: of the last state, one could not: it tries again.
        """
        asked, size = self._asked, of or self._nodes.size
        until = time.monotonic() + (SENDING_SECONDS if word in (PART, MADE) else PATIENCE_SECONDS)
        while len((said := self._nodes.said(asked)).get(word, ())) < size:
            if not asked.last and self._ended.is_set():
                raise Ended
            if not self._nodes.leads and self._nodes.asked() != asked:
                raise Anew
            if others := sorted(said.get(NOT, set()) - {self._nodes.rank}):
                self._give_up(f"node {others[0]} could not take part")
            if not asked.last and time.monotonic() > until:
                raise Apart(f"not all nodes came within {PATIENCE_SECONDS:g} s")
            if asked.last:
                self._stay_for("other nodes")
            time.sleep(min(POLL_SECONDS, every(self.interval)))
        return said

    def _give_up(self, reason: str) -> None:
        """Of the last state, the first asks once more after a pause; the others wait for that."""
        if not self._asked.last:
            raise Apart(reason)
        if self._nodes.leads:
            raise StoreUnavailable(reason)

    def _stay_for(self, whom: str) -> None:
        """Raises Apart where this command has failed, or is to stop, and others go on for too long."""
        if not self.hurries():
            return
        now = time.monotonic()
        self._hurries_since = now if self._hurries_since is None else self._hurries_since
        if now - self._hurries_since > LAST_SECONDS:
            raise Apart(f"{whom} did not end within {LAST_SECONDS:g} s")


def begin_together(states: States, nodes: Nodes, cache: Path, checkpoints: Path) -> Mapping[str, Stamp]:
    """What all nodes go on from; what lies here alone does not count. Returns what of it is other nodes'.

    Raises:
        Restart: not all came, or a file is broken: then the state goes, and the start after this finds the one before.
    """
    uri = nodes.meet(lambda: found.uri if (found := states.newest() or states.store.find(states.place)) else None)
    if uri is None:
        return {}
    state = states.store.find(uri)
    try:
        if state is None:
            raise BrokenArtifact(f"{uri} has no readable manifest")
        borrowed = bring_part(states.store, state, nodes.rank, cache, checkpoints)
    except BrokenArtifact as problem:
        states.store.delete(uri)
        raise Restart(f"the checkpoints at {uri} are not whole: {problem}") from None
    say(f"checkpoints: those of node {nodes.rank} brought back from {state.uri}")
    return borrowed
