"""GPU hours of local attempts: recorded by the supervisor, not by the program."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.compute.base import Phase
from resources.compute.local.gpu_meter import GpuMeter
from resources.metadata.database import Database
from resources.metadata.jobs import Jobs
from resources.monitoring.usage_totals import read_totals
from resources.stack.detached_process import PID_FILE
from tests.support.postgres_server import migrated_sqlite, sqlite_url
from tests.support.resources.gpu_admission import GpuMachine, gpu_machine, source
from tests.support.resources.local_backend import until

__all__ = ["migrated_sqlite", "source", "sqlite_url"]  # fixtures

H100 = "nvidia-h100-80gb"


@pytest.fixture
def database(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.close()


def new_supervisor(there: GpuMachine, database: Database) -> None:
    there.meter = GpuMeter(lambda: database, lambda: H100, extend_seconds=0.05)


def read_allocated(database: Database) -> dict[tuple[str, ...], float]:
    with database.read() as connection:
        return dict(read_totals(connection).gpus_allocated)


def read_hours(database: Database) -> float:
    with database.read() as connection:
        return sum(read_totals(connection).gpu_hours.values())


def record(database: Database, name: str) -> None:
    Jobs(database).submit(name=name, config={}, user="ann", organization="acme", id=name)


def test_a_job_holds_its_gpus_until_its_program_ends(tmp_path: Path, source: Path, database: Database) -> None:
    with gpu_machine(tmp_path, source, "0", "1") as there:
        new_supervisor(there, database)
        record(database, "pair")
        job = there.submitted("pair", gpus=2)
        assert read_allocated(database) == {(H100,): 2}
        until("some time of it", lambda: there.phase(job) is Phase.RUNNING and read_hours(database) > 0)
        while_running = read_hours(database)
        there.end(job)
        used = read_hours(database)
        assert read_allocated(database) == {} and used >= while_running
        new_supervisor(there, database)
        assert there.phase(job) is Phase.SUCCEEDED and read_hours(database) == used, "seen again, it used no more"


def test_unsupervised_time_counts_until_the_end_of_the_program(tmp_path: Path, source: Path, database: Database) -> None:
    with gpu_machine(tmp_path, source, "0") as there:
        record(database, "killed")
        new_supervisor(there, database)
        started = time.time()
        job = there.submitted("killed")
        assert there.on(job) == "0"
        os.kill(json.loads((Path(job.work_dir) / PID_FILE).read_text()), signal.SIGKILL)
        killed = time.time()
        time.sleep(2.0)
        new_supervisor(there, database)
        until("the end of the first attempt", lambda: there.phase(job) is Phase.RESTARTING)
        assert read_hours(database) * 3600 <= killed - started
        assert read_allocated(database) == {(H100,): 1}, "of the second attempt alone"
        until("its second program", lambda: there.on(job) == "0 0")
        there.end(job)


def test_a_machine_without_gpus_counts_none(tmp_path: Path, source: Path, database: Database) -> None:
    """Regression: a `sleep` that requested an A100 on a laptop was metered as one A100."""
    with gpu_machine(tmp_path, source, known=False) as there:
        new_supervisor(there, database)
        record(database, "sleep")
        job = there.submitted("sleep", gpus=1)
        assert (read_allocated(database), there.on(job)) == ({}, "all")
        there.end(job)
        assert read_hours(database) == 0
