"""Requests that an API server would deny because no role rule allows them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REQUEST = re.compile(
    r"(?P<method>[A-Z]+) (?:/api/v1|/apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/?]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/?]+))?(?:/(?P<subresource>[a-z]+))?(?:\?(?P<query>.*))?"
)
VERBS = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}


def denied(
    requests: Iterable[str], namespaced: Sequence[Mapping[str, Any]], cluster_wide: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the requests that no rule of a Role or ClusterRole allows.

    A request is written as `GET /api/v1/nodes`.
    """
    return sorted({request for request in requests if not is_allowed(request, namespaced, cluster_wide)})


def is_allowed(request: str, namespaced: Sequence[Mapping[str, Any]], cluster_wide: Sequence[Mapping[str, Any]]) -> bool:
    found = REQUEST.fullmatch(request)
    assert found is not None, request
    resource = "/".join(filter(None, (found["resource"], found["subresource"])))
    verb = VERBS.get(found["method"]) or (
        "get" if found["name"] else "watch" if "watch=1" in (found["query"] or "") else "list"
    )
    rules = [*cluster_wide, *(namespaced if found["namespace"] else ())]
    return any(
        (found["group"] or "") in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
        for rule in rules
    )
