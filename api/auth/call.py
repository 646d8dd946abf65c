"""What is known of a call, from when it comes in until it is on record."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from starlette.types import Scope

from api.auth.permissions import Caller
from api.auth.route_matching import Match
from api.auth.table import Audit
from resources.metadata.audit import MAX_OBJECTS, AuditedCall
from resources.metadata.scope import Kind, Reference


@dataclass
class Call:
    """What is known of a call so far, for its audit row."""

    method: str
    route: str
    client: str
    started: float
    audit: Audit = Audit.EACH
    caller: Caller | None = None
    references: frozenset[Reference] = frozenset()
    state: Mapping[str, Any] = field(default_factory=dict)
    is_counted: bool = False
    """Counted in the transaction of what it changed, and so on record already."""

    @property
    def duration_ms(self) -> float:
        """Until now."""
        return round((time.perf_counter() - self.started) * 1000, 3)

    def audited(self, status: int, duration_ms: float = 0.0) -> AuditedCall:
        """Without a duration, the kind of call that it is counted as."""
        return AuditedCall(
            user=self.caller.user_id if self.caller else "",
            organization=self.caller.organization if self.caller else "",
            roles=tuple(sorted(self.caller.roles)) if self.caller else (),
            method=self.method,
            route=self.route,
            objects=self._objects(),
            status=status,
            client=self.client,
            duration_ms=duration_ms,
        )

    def _objects(self) -> tuple[str, ...]:
        run_id, dataset_id = self.state.get("run_id"), self.state.get("dataset_id")
        run = (str(Reference(Kind.RUN, str(run_id))),) if run_id else ()
        if dataset_id:  # found by its name
            return (str(Reference(Kind.DATASET, str(dataset_id))),)
        # Each logged metric comes by here, and names its run alone.
        return tuple(nsmallest(MAX_OBJECTS, {*map(str, self.references), *run})) if self.references else run


def call_of(scope: Scope, match: Match | None) -> Call:
    client = scope["client"][0] if scope.get("client") else ""
    route = match.route.template if match else ""
    return Call(scope["method"], route, client, time.perf_counter(), state=scope["state"])
