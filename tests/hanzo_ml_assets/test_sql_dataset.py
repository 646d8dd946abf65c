"""One query by definition, HTTP and command line gives one version, in any order."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import httpx
import pytest
import yaml
from pydantic import ValidationError

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import build_dataset_assets
from hanzo_ml_assets.definition_schema import DatasetDefinition
from recipes.records.sql_query import iterate_query_lines
from tests.support.cli.command_line import run
from tests.support.server_process import ServerProcess
from tests.support.shop_database import shop

__all__ = ["shop"]
STATEMENT = "SELECT id, note, raw, price FROM orders ORDER BY id"


@pytest.fixture
def server(tmp_path: Path, shop: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """Start a server that may query the shop, on the graph's state of this process."""
    home = tmp_path / "home"
    home.mkdir()
    databases = {"shop": {"url": shop, "organizations": ["default"]}, "closed": {"url": shop}}
    (home / "config.yaml").write_text(yaml.safe_dump({"storage": {"databases": databases}}))
    with ServerProcess(home) as process:
        for name, value in process.environment.items():
            if name.startswith("HANZO_ML_"):
                monkeypatch.setenv(name, value)
        yield process


def materialized(**definition: object) -> dg.ExecuteInProcessResult:
    described = DatasetDefinition.model_validate({"name": "orders", **definition})
    return dg.materialize(
        build_dataset_assets(described, Path()),
        selection=[dg.AssetKey(["datasets", "orders", "version"])],
        resources={"control_plane": ControlPlane()},
        raise_on_error=False,
    )


def test_same_query_by_definition_http_and_command_line_creates_one_version(server: ServerProcess, shop: str) -> None:
    assert materialized(sql=STATEMENT, database="closed").success
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        [made] = http.get("/v1/datasets", params={"name": "orders"}).json()["datasets"]
        said = {"name": "orders", "sql": STATEMENT, "database": "shop"}
        file = {"files": ("query.jsonl", b"".join(iterate_query_lines(shop, STATEMENT)))}
        answers = [
            http.post("/v1/datasets", json=said),
            http.post("/v1/datasets", data=said),
            http.post("/v1/datasets", data={"name": "orders"}, files=file),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200], answers[0].text
    found = [answer.json() for answer in answers]
    for database in ("shop", shop):
        done = run(server.url, "dataset", "create", "--name", "orders", "--sql", STATEMENT, "--database", database, "--json")
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert {(each["id"], each["created"], each["num_records"]) for each in found} == {(made["id"], False, 2500)}
    assert made["lineage"]["origins"] == [f"sql://closed?{STATEMENT}"]


def test_changed_rows_create_the_next_version_with_their_query_as_origin(server: ServerProcess, shop: str) -> None:
    assert materialized(sql=STATEMENT, database="shop").success
    with sqlite3.connect(shop.removeprefix("sqlite:///")) as connection:
        connection.execute("DELETE FROM orders WHERE id > 9")
    done = run(server.url, "dataset", "create", "--name", "orders", "--sql", STATEMENT, "--database", "shop", "--json")
    made = json.loads(done.stdout)
    assert (made["created"], made["version"], made["num_records"], made["metadata"]) == (True, 2, 10, {})
    lineage = run(server.url, "dataset", "lineage", "orders@2").stdout
    assert f"↑ sql://shop?{STATEMENT}" in lineage


def test_disallowed_database_over_http_is_refused_without_revealing_its_address(server: ServerProcess, shop: str) -> None:
    refused = {
        (403, "this server asks no database called 'closed' for your organization"): {"database": "closed"},
        (403, f"this server asks no database called '{shop[:90]}"): {"database": shop},
        (403, "no database called 'sqlite:///"): {"database": f"sqlite:///{server.home}/hanzo-ml.db"},
        (400, "the name of its `database`: exactly one of these"): {"source": "s3://bucket/key"},
        (400, "or a query as `sql`"): {"database": None},
        (400, "read as jsonl, and not as csv"): {"format": "csv"},
        (400, "'shop' cannot be read: the database says: no such table: users"): {"sql": "SELECT * FROM users"},
        (400, "'shop' cannot be read: the query, or the address"): {"sql": "SELECT 1 AS x\0"},
    }
    for (status, words), changes in refused.items():
        said = {"name": "orders", "sql": STATEMENT, "database": "shop"} | changes
        body = json.dumps({name: value for name, value in said.items() if value is not None})
        answer = httpx.post(
            f"{server.url}/v1/datasets", content=body, headers={"Content-Type": "application/json"}, trust_env=False
        )
        assert (answer.status_code, words in answer.json()["message"]) == (status, True), answer.text
    listed = httpx.get(f"{server.url}/v1/datasets", params={"name": "orders"}, trust_env=False).json()
    assert listed["datasets"] == []


def test_definition_with_an_invalid_query_fails_with_the_reason(server: ServerProcess) -> None:
    done = materialized(sql="SELECT * FROM users", database="shop")
    [failed] = [event for event in done.all_events if event.is_step_failure]
    assert "no such table: users" in failed.step_failure_data.error_display_string
    assert str(server.home.parent / "shop.db") not in failed.step_failure_data.error_display_string


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"sql": "SELECT 1"}, "sql and database belong together"),
        ({"database": "shop"}, "sql and database belong together"),
        ({"sql": "SELECT 1", "database": "shop", "source": "a.jsonl"}, "cannot have source or format"),
        ({"sql": "SELECT 1", "database": "shop", "format": "csv"}, "cannot have source or format"),
    ],
)
def test_definition_with_incomplete_or_conflicting_sql_source_is_refused(definition: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DatasetDefinition.model_validate({"name": "orders", **definition})
