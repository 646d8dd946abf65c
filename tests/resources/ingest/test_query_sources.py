"""Query datasets: only configured databases, only for allowed organizations, without showing an address."""

import json
import logging
from pathlib import Path

import pytest
import yaml

from recipes.contracts.dataset_formats import Format
from recipes.contracts.job import BadConfiguration
from resources.errors import ErrorCode, HanzoError
from resources.ingest.new_version import NewVersion
from resources.ingest.remote_sources import allowed_query_source, query_source
from resources.ingest.version_creation import create_from_files
from resources.settings.settings import Settings
from tests.support.free_ports import free_port
from tests.support.postgres_server import postgres, postgres_url
from tests.support.resources.dataset_versions import Place
from tests.support.shop_database import shop, warehouse

__all__ = ["postgres", "postgres_url", "shop", "warehouse"]
PASSWORD = "c4n4ry"


def asking(home: Path, **databases: object) -> Settings:
    """Return settings with databases, each an address or a section."""
    sections = {name: {"url": each} if isinstance(each, str) else each for name, each in databases.items()}
    home.mkdir(exist_ok=True)
    (home / "config.yaml").write_text(yaml.safe_dump({"storage": {"databases": sections}}))
    return Settings.load({"HANZO_ML_HOME": str(home)})


@pytest.mark.requirement("B12")
@pytest.mark.parametrize("kind", ["shop", "warehouse"])
def test_query_rows_become_a_version_whose_lineage_names_only_the_database(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url, statement = request.getfixturevalue(kind), "SELECT id FROM orders ORDER BY id"
    file = query_source(asking(tmp_path / "home", orders=url), "orders", statement, Format.JSONL)
    place = Place(tmp_path)
    new = NewVersion("d", "jsonl", "u", "default")
    made, is_new = create_from_files(place.database, place.store, new, [file])
    assert (made.num_records, is_new, made.lineage["origins"]) == (2500, True, [f"sql://orders?{statement}"])
    assert create_from_files(place.database, place.store, new, [file]) == (made, False)


def test_database_is_queried_over_http_only_for_allowed_organizations(tmp_path: Path, shop: str) -> None:
    """For other organizations it does not exist."""
    granted = asking(tmp_path / "home", shop={"url": shop, "organizations": ["acme"]}, closed=shop)
    with allowed_query_source(granted, "shop", "SELECT id FROM orders", Format.JSONL, "acme").open() as rows:
        assert len(rows.readlines()) == 2500
    words = set()
    for name, organization in (("shop", "rival"), ("closed", "acme"), ("closed", ""), ("none", "acme"), (shop, "acme")):
        with pytest.raises(HanzoError) as refused:
            allowed_query_source(granted, name, "SELECT 1", Format.JSONL, organization)
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        words.add(refused.value.message.replace(repr(name), "NAME"))
    assert words == {
        "this server asks no database called NAME for your organization: upload the rows, or have its operator add it to "
        "storage.databases"
    }


def test_query_of_an_unconfigured_database_is_refused(tmp_path: Path, shop: str) -> None:
    with pytest.raises(HanzoError, match=r"no database is called 'shops': name it, with its url, in storage\.databases"):
        query_source(asking(tmp_path / "home", shop=shop), "shops", "SELECT 1", Format.JSONL)


def test_query_in_a_format_other_than_jsonl_is_refused(tmp_path: Path, shop: str) -> None:
    with pytest.raises(HanzoError, match="read as jsonl, and not as csv: leave the format out"):
        query_source(asking(tmp_path / "home", shop=shop), "shop", "SELECT 1", Format.CSV)


def test_unreachable_database_is_logged_and_its_address_is_hidden_from_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    urls = {
        "away": f"postgresql://someone:{PASSWORD}@127.0.0.1:{port}/shop",
        "gone": f"sqlite:///{tmp_path}/gone.db",
    }
    for name, url in urls.items():
        caplog.clear()
        found = asking(tmp_path / "home", **{name: url})
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(HanzoError) as caught,
            query_source(found, name, "SELECT 1", Format.JSONL).open(),
        ):
            pass
        assert caught.value.code is ErrorCode.TEMPORARILY_UNAVAILABLE
        assert caught.value.message.startswith(f"database '{name}' cannot be reached: try again later")
        for secret in (PASSWORD, "127.0.0.1", str(port), str(tmp_path)):
            assert secret not in caught.value.message
        assert name in caplog.text and PASSWORD not in caplog.text


def test_failed_query_is_rejected_with_the_message_of_the_database(tmp_path: Path, shop: str) -> None:
    found = asking(tmp_path / "home", shop={"url": shop, "seconds": 1})
    for statement, message in (
        ("SELECT tax FROM orders", "the database says: no such column: tax"),
        ("DELETE FROM orders", "the database says: attempt to write a readonly database"),
        ("SELECT 1 AS x WHERE 1 = 2", "the query has no rows"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT count(*) FROM n", "exceeded the limit of 1 s"),
    ):
        with pytest.raises(HanzoError, match=f"the rows of database 'shop' cannot be read: .*{message}") as caught:
            query_source(found, "shop", statement, Format.JSONL).open().__enter__()
        assert caught.value.code is ErrorCode.INVALID_PARAMETER_VALUE
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("databases", "message"),
    [
        ({"shop": f"mysql://u:{PASSWORD}@h/d"}, "no address such as"),
        ({"shop": f"postgresql://u:{PASSWORD}@h"}, "no address such as"),
        ({"shop": f"postgresql://u:{PASSWORD}@[/d"}, "no address such as"),
        ({"shop": "sqlite:///shop.db"}, "no address such as"),
        ({"shop": "sqlite://"}, "no address such as"),
        ({"my shop": "sqlite:////shop.db"}, "'my shop' is no name of a database"),
        ({"shop": {"organizations": ["default"]}}, "storage.databases.shop.url"),
        ({"own": "{home}/hanzo-ml.db"}, r"storage\.databases\.own\.url is this server's own database"),
        ({"own": "{home}/dagster/runs.db"}, r"storage\.databases\.own\.url is this server's own database"),
    ],
)
def test_invalid_or_own_database_in_the_settings_is_refused(
    tmp_path: Path, databases: dict[str, object], message: str
) -> None:
    home = tmp_path / "home"
    filled = {
        name: each if isinstance(each, dict) else str(each).format(home=f"sqlite:///{home}")
        for name, each in databases.items()
    }
    with pytest.raises(BadConfiguration, match=message) as refused:
        asking(home, **filled)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize(
    "own", [f"postgresql://ml:{PASSWORD}@db/ml", "postgresql://other@db:5432/ml", "postgresql:///ml?host=db&port=5432"]
)
def test_own_metadata_database_in_postgresql_is_refused_as_a_source(tmp_path: Path, own: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"storage": {"databases": {"own": {"url": own}}}}))
    variables = {"HANZO_ML_HOME": str(tmp_path), "HANZO_ML_DATABASE_URL": "postgresql+psycopg://ml:x@db:5432/ml"}
    with pytest.raises(BadConfiguration, match=r"storage\.databases\.own\.url is this server's own database: name another"):
        Settings.load(variables)
    assert Settings.load({**variables, "HANZO_ML_DATABASE_URL": "postgresql://ml:x@db:5432/other"}).storage.databases


def test_masked_settings_hide_database_addresses(tmp_path: Path) -> None:
    shown = asking(tmp_path, shop=f"postgresql://someone:{PASSWORD}@db.internal/shop").masked()
    assert list(shown["storage"]["databases"]) == ["shop"]
    assert PASSWORD not in json.dumps(shown) and "db.internal" not in json.dumps(shown)
