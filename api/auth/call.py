"""What is known of a call, from when it comes in until it is on record."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from api.auth.permissions import Caller
from api.auth.routes import Match
from api.auth.table import Audit
from resources.metadata.audit import AuditedCall
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

    def audited(self, status: int) -> AuditedCall:
        objects = {str(reference) for reference in self.references} if self.references else set()
        if run_id := self.state.get("run_id"):
            objects.add(str(Reference(Kind.RUN, str(run_id))))
        return AuditedCall(
            user=self.caller.user_id if self.caller else "",
            organization=self.caller.organization if self.caller else "",
            roles=tuple(sorted(self.caller.roles)) if self.caller else (),
            method=self.method,
            route=self.route,
            objects=tuple(sorted(objects)),
            status=status,
            client=self.client,
            duration_ms=round((time.perf_counter() - self.started) * 1000, 3),
        )


def call_of(scope: Scope, match: Match | None) -> Call:
    client = scope["client"][0] if scope.get("client") else ""
    route = match.route.template if match else ""
    return Call(scope["method"], route, client, time.perf_counter(), state=scope["state"])
