"""Migrations create exactly the schema in code, once, also when run concurrently."""

import hashlib
import subprocess
import sys
from pathlib import Path

import alembic.command
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.metadata.migrate import MIGRATIONS
from resources.metadata.outbox import emit
from resources.metadata.tables import schema
from resources.metadata.tracking.tracking import Tracking
from resources.monitoring.usage_totals import read_totals

ROOT = Path(__file__).resolve().parents[3]


def test_migrations_create_the_tables_of_the_schema(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/new/folder/metadata.db")
    database.migrate()
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
        assert compare_metadata(context, schema) == []


def test_migrated_database_has_the_keys_and_constraints_of_the_schema(tmp_path: Path) -> None:
    """Alembic's comparison omits primary keys and unique constraints, on which the guarantees rely."""
    migrated, created = (Database(f"sqlite:///{tmp_path}/{name}.db") for name in ("migrated", "created"))
    migrated.migrate()
    with created.write() as connection:
        schema.create_all(connection)
    with migrated.read() as left, created.read() as right:
        found, wanted = inspect(left), inspect(right)
        assert set(wanted.get_table_names()) == set(found.get_table_names()) - {"alembic_version"}
        for table in schema.tables:
            assert (
                found.get_pk_constraint(table)["constrained_columns"]
                == (wanted.get_pk_constraint(table)["constrained_columns"])
            )
            uniques = [
                sorted(sorted(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table))
                for inspector in (found, wanted)
            ]
            assert uniques[0] == uniques[1], table
            nullable = [{c["name"]: c["nullable"] for c in inspector.get_columns(table)} for inspector in (found, wanted)]
            assert nullable[0] == nullable[1], table


def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/metadata.db")
    database.migrate()
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO artifacts VALUES ('d', 'k', 'u', 1, 1)")
    database.migrate()
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM artifacts").scalar() == 1


def test_older_database_gains_new_tables_and_keeps_its_rows(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.write() as connection:
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "0001")
        connection.exec_driver_sql("INSERT INTO artifacts VALUES ('d', 'k', 'u', 1, 1)")
    with database.read() as connection:
        assert set(schema.tables) - set(inspect(connection).get_table_names())
    database.migrate()
    with database.read() as connection:
        assert set(schema.tables) <= set(inspect(connection).get_table_names())
        assert connection.exec_driver_sql("SELECT count(*) FROM artifacts").scalar() == 1


def test_migration_keeps_the_order_of_inputs_and_models_and_allows_unknown_models(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    tracking.runs.create(0, run_id="run")
    model = tracking.logged_models.create(0).model.id
    with database.write() as connection:
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "0002")
        for number, name in ((1, "z"), (2, "a")):
            row = f"INSERT INTO inputs VALUES ({number}, 0, '{name}', '1', 'local', 'here', NULL, NULL)"
            connection.exec_driver_sql(row)
            connection.exec_driver_sql(f"INSERT INTO run_inputs VALUES ('run', {number}, '{{}}')")
        connection.exec_driver_sql(f"INSERT INTO run_models VALUES ('run', '{model}', 'output', 3)")
    database.migrate()
    tracking.logged_models.log_outputs("run", {"m-elsewhere": 1})
    found = tracking.run_search.get(tracking.runs.get("run"))
    assert [used.dataset.name for used in found.inputs] == ["z", "a"]
    assert [(made.model_id, made.step) for made in found.models] == [(model, 3), ("m-elsewhere", 1)]


def test_migration_keeps_gpu_hours_of_completed_jobs(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    jobs = Jobs(database)
    with database.write() as connection:
        for job, hours in (("trained", 1.5), ("without-gpus", 0.0), ("again", 2.0)):
            jobs.submit(name=job, config={}, user="ann", organization="acme", id=job, connection=connection)
            jobs.complete(connection, job, {}, training_seconds=1.0, gpu_hours=hours)
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "0006")
        emit(connection, "jobs", "job.completed", "again", {"job_id": "again", "gpu_hours": 2.5})
    database.migrate()
    with database.read() as connection:
        assert read_totals(connection).gpu_hours == {("unknown", "acme"): 4.0}


@pytest.mark.parametrize(
    ("migration", "sha256"),
    [
        ("0001_first_tables.py", "08e9999b6832b53d3eaccfbea51b5033dfe366025236b880ac014a0ffc41e343"),
        ("0002_counted_calls.py", "4432fcb036b296a55d0ea6ac4d5ed75ff5e6b23c7af07ab9e668db412f733ed8"),
        ("0003_order_of_inputs.py", "4821d777a151ed038a833d93b48555bd7899e5ff29857f6183ed546547279f7c"),
        ("0004_order_of_pages.py", "cc3fd34e25fd0a28b6f53430a9f678e17e3fbf9770c07946e3ba5d06a9161938"),
        ("0005_audit_since_a_time.py", "64c9d0e861310497f70f8f7bfbb61220b1431737cccfeb2b5e1a3cbf372a529b"),
        ("0006_cluster_jobs.py", "6df90f75eb9ca0c696a2c39e641e2de18813e801df47ace7366a8dada98346c3"),
        ("0007_gpu_usage.py", "ff336970a27a8f028ee35eabc4c2e2fe40e9c47f80f77d6a783ff1f1e719b188"),
        ("0008_saved_checkpoints.py", "81437ebb467078637d49626b0785ecaa2df314ec54b26671cbce7fb33e26783b"),
        ("0009_engine_replicas.py", "b07419d3f2e27cba98562664174f6df6d4a0450b54f4fb929673e23b85edaf4a"),
    ],
)
def test_a_migration_that_landed_is_never_changed(migration: str, sha256: str) -> None:
    """Migrated databases would silently lack the change: write a new migration instead."""
    assert hashlib.sha256((MIGRATIONS / "versions" / migration).read_bytes()).hexdigest() == sha256


@pytest.mark.slow
def test_concurrent_migrations_all_succeed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/metadata.db"
    text = (
        "import sys; from resources.metadata.database import Database; sys.stdin.readline(); Database(sys.argv[1]).migrate()"
    )
    command = [sys.executable, "-c", text, url]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    ended = [(process.communicate("go\n")[1], process.returncode) for process in processes]
    assert [code for _, code in ended] == [0, 0, 0], ended
