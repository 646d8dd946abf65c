"""`hanzo-ml dataset create --sql`."""

import json
import subprocess
from collections.abc import Callable

from tests.support.cli.command_line import cli
from tests.support.postgres_server import postgres, postgres_url
from tests.support.shop_database import shop, warehouse

__all__ = ["cli", "postgres", "postgres_url", "shop", "warehouse"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def test_sqlite_query_rows_become_a_version(cli: Cli, shop: str) -> None:
    arguments = ("dataset", "create", "--name", "orders", "--sql", "SELECT * FROM orders ORDER BY id", "--database", shop)
    made = json.loads(cli(*arguments, "--json").stdout)
    assert (made["num_records"], made["metadata"]) == (2500, {"sql": "SELECT * FROM orders ORDER BY id"})
    assert made["schema"] == {"id": "integer", "note": "string", "price": "null|number", "raw": "string"}
    first = json.loads(cli("dataset", "preview", "orders@1", "-n", "1").stdout)
    assert first == {"id": 0, "note": "note 0", "price": 0.5, "raw": "AP8="}


def test_postgresql_query_rows_become_a_version(cli: Cli, warehouse: str) -> None:
    statement = "SELECT id, price, day, at, took, raw, note, key, parts FROM orders ORDER BY id"
    arguments = ("dataset", "create", "--name", "warehouse", "--sql", statement, "--database", warehouse)
    made = json.loads(cli(*arguments, "--json").stdout)
    assert (made["num_records"], made["metadata"]) == (2500, {"sql": statement})
    (first, _, third) = map(json.loads, cli("dataset", "preview", "warehouse@1", "-n", "3").stdout.splitlines())
    assert first == {
        "id": 0,
        "price": "0.10",
        "day": "2024-02-29",
        "at": "2024-02-29T12:30:00Z",
        "took": "PT90S",
        "raw": "AP8=",
        "note": {"a": [1.5, None]},
        "key": "00000000-0000-0000-0000-000000000001",
        "parts": [1, 2],
    }
    assert (third["id"], third["price"]) == (2, "2.10")


def test_format_option_with_a_query_is_refused(cli: Cli, shop: str) -> None:
    done = cli("dataset", "create", "--name", "x", "--sql", "SELECT 1", "--database", shop, "--format", "csv")
    assert done.returncode == 1 and "--format describes the files at --path" in done.stderr


def test_unreachable_database_is_refused_without_printing_its_password(cli: Cli) -> None:
    url = "postgresql://someone:the-password@127.0.0.1:9/shop"
    done = cli("dataset", "create", "--name", "x", "--sql", "SELECT 1", "--database", url)
    assert done.returncode == 1 and "the database says" in done.stderr
    assert "the-password" not in done.stderr
