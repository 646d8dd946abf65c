"""What a page in a browser may send (row F5): questions, whatever else has a name that sounds like one."""

import re

import pytest

from api.auth.table import RULES
from api.middleware.read_only_pages import writes

NAMES = ("search", "search-datasets", "get-latest-versions", "graphql", "ui-telemetry", "login")
PARAMETER = re.compile(r"\{[^}]*\}|(?<=/)\*+")


@pytest.mark.parametrize("name", NAMES)
def test_no_route_that_writes_is_taken_for_a_question(name: str) -> None:
    """`DELETE .../artifacts/search` was, and any other of an object of such a name."""
    taken = [
        route
        for route, rule in RULES.items()
        if rule.writes and not writes(*PARAMETER.sub(name, route).split(" ", 1))  # type: ignore[call-arg]
    ]
    assert taken == []
    assert sum(rule.writes for rule in RULES.values()) > 100
    assert any(PARAMETER.search(route) for route, rule in RULES.items() if rule.writes)


@pytest.mark.parametrize(
    "path",
    [
        "/ajax-api/2.0/mlflow/runs/search",
        "/api/2.0/mlflow/experiments/search",
        "/ajax-api/2.0/mlflow/logged-models/search",
        "/ajax-api/2.0mlflow/experiments/search-datasets",
        "/ajax-api/3.0/mlflow/traces/search",
        "/ajax-api/2.0/mlflow/registered-models/get-latest-versions",
        "/graphql",
        "/ajax-api/3.0/mlflow/ui-telemetry",
        "/login",
    ],
)
def test_a_question_is_none_by_another_method(path: str) -> None:
    assert not writes("POST", path)
    assert [method for method in ("PUT", "PATCH", "DELETE") if not writes(method, path)] == []
