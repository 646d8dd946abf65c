"""A page in a browser may only send reads, however a writing route is named."""

import re

import pytest

from api.app import create_app
from api.auth.route_matching import Routes
from api.middleware.browser_security import changes_something
from resources.settings.settings import Settings

NAMES = ("search", "search-datasets", "get-latest-versions", "graphql", "ui-telemetry", "login")
PARAMETER = re.compile(r"\{[^}]*\}|(?<=/)\*+")


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return method and template of every route that changes something."""
    app = create_app(Settings.load({"HANZO_ML_HOME": str(tmp_path_factory.mktemp("pages"))}))
    return [
        f"{route.method} {route.template}"
        for route in Routes(app).all
        if route.declaration is not None and route.declaration.writes
    ]


@pytest.mark.requirement("F5")
@pytest.mark.parametrize("name", NAMES)
def test_writing_routes_are_never_classified_as_reads(writing: list[str], name: str) -> None:
    """`DELETE .../artifacts/search` was, as were all routes of objects with such names."""
    requests = [PARAMETER.sub(name, route).split(" ", 1) for route in writing]
    assert [(method, path) for method, path in requests if not changes_something(method, path)] == []
    assert len(writing) > 100
    assert any(PARAMETER.search(route) for route in writing)


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
def test_read_by_post_routes_count_as_writes_with_other_methods(path: str) -> None:
    assert not changes_something("POST", path)
    assert [method for method in ("PUT", "PATCH", "DELETE") if not changes_something(method, path)] == []
