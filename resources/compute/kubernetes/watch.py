"""In-memory mirror of one kind of objects, updated by list and watch in one thread.

A watch may die silently when its server is gone. Therefore each watch has a server-side timeout of `WATCH_SECONDS`, and a
stream that received nothing for longer counts as broken.
"""

import logging
import threading
import time
from collections.abc import Callable

from resources.compute.kubernetes.cluster import Cluster, ClusterError, InvalidObject, Item, Kind, ResourceVersionExpired

log = logging.getLogger(__name__)

WATCH_SECONDS = 30
SILENCE_SECONDS = WATCH_SECONDS + 10.0
RETRY_SECONDS = 1.0
DELETED_SECONDS = 900.0
"""How long the last state of a deleted object is kept: that of a pod says why its program ended."""
BOOKMARK = "BOOKMARK"


class Mirror:
    """Objects of one kind in all namespaces, by uid.

    Args:
        changed: called after each change, from the mirror's thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        changed: Callable[[], None],
        label_selector: str | None = None,
    ) -> None:
        self.kind = kind
        self._cluster = cluster
        self._changed = changed
        self._selectors = {"labelSelector": label_selector} if label_selector else {}
        self._lock = threading.Lock()
        self._items: dict[str, Item] = {}
        self._deleted: dict[str, tuple[float, Item]] = {}
        self._version: str | None = None
        self._contact: float | None = None
        self._problem = "its first list has not arrived"

    def start(self) -> None:
        threading.Thread(target=self._follow_forever, name=f"mirror of {self.kind.plural}", daemon=True).start()

    @property
    def is_synced(self) -> bool:
        """Whether the first list has arrived."""
        return self._contact is not None

    @property
    def silent_seconds(self) -> float:
        """Time since the API server last answered; how old the copy may be."""
        return float("inf") if self._contact is None else time.monotonic() - self._contact

    @property
    def problem(self) -> str:
        """Why the copy is not current, for people; empty if it is."""
        return self._problem

    def items(self) -> list[Item]:
        with self._lock:
            return list(self._items.values())

    def deleted(self) -> list[Item]:
        """Last states of objects that were deleted in the last `DELETED_SECONDS`."""
        with self._lock:
            self._forget_old()
            return [item for _, item in self._deleted.values()]

    def put(self, item: Item) -> None:
        """Add an object that this process created, before its watch event arrives."""
        uid = item["metadata"]["uid"]
        with self._lock:
            if uid not in self._deleted:
                self._items.setdefault(uid, without_managed_fields(item))

    def _follow_forever(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.follow()
                if time.monotonic() - began < RETRY_SECONDS:  # no request storm if the server ends each watch at once
                    time.sleep(RETRY_SECONDS)
            except ResourceVersionExpired:
                self._version = None
            except ClusterError as problem:
                if isinstance(problem, InvalidObject):  # the server does not know the version
                    self._version = None
                if str(problem) != self._problem:
                    log.warning("watching %s: %s", self.kind.plural, problem)
                self._problem = str(problem)
                time.sleep(RETRY_SECONDS)
            except Exception:
                # An object that cannot be parsed must not end the mirror: it lists again.
                log.exception("watching %s failed, will list again", self.kind.plural)
                self._version = None
                time.sleep(RETRY_SECONDS)

    def follow(self) -> None:
        """List if needed, then follow one watch to its end. Raises ClusterError."""
        if self._version is None:
            self.refresh()
        assert self._version is not None
        stream = self._cluster.watch(self.kind, self._version, WATCH_SECONDS, SILENCE_SECONDS, **self._selectors)
        for event, item in stream:
            self._apply(event, item)
            self._version = item["metadata"].get("resourceVersion") or self._version
            self._note_contact()
        self._note_contact()

    def refresh(self) -> None:
        """List all objects. Raises ClusterError."""
        items, self._version = self._cluster.list(self.kind, **self._selectors)
        self._replace(items)
        self._note_contact()

    def _note_contact(self) -> None:
        self._contact, self._problem = time.monotonic(), ""

    def _replace(self, items: list[Item]) -> None:
        fresh = {item["metadata"]["uid"]: without_managed_fields(item) for item in items}
        with self._lock:
            for uid in self._items.keys() - fresh.keys():
                self._remember(uid, self._items[uid])
            self._items = fresh
        self._changed()

    def _apply(self, event: str, item: Item) -> None:
        if event == BOOKMARK:
            return
        uid = item["metadata"]["uid"]
        with self._lock:
            if event == "DELETED":
                self._items.pop(uid, None)
                self._remember(uid, without_managed_fields(item))
            else:
                self._items[uid] = without_managed_fields(item)
        self._changed()

    def _remember(self, uid: str, item: Item) -> None:
        self._forget_old()
        self._deleted[uid] = (time.monotonic(), item)

    def _forget_old(self) -> None:
        oldest = time.monotonic() - DELETED_SECONDS
        self._deleted = {uid: entry for uid, entry in self._deleted.items() if entry[0] > oldest}


def without_managed_fields(item: Item) -> Item:
    """Drop `managedFields`, a third of an object's size, which nothing here reads."""
    item["metadata"].pop("managedFields", None)
    return item
