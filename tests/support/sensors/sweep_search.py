"""A sweep on a real control plane, and crashes of its sensor."""

from typing import Any

from sqlalchemy import event

from recipes.storage.manifest import Artifact
from resources.hpo.sweep_advance import cancel_sweep
from resources.hpo.sweep_rows import Snapshot
from resources.hpo.sweeps import Sweeps
from resources.hpo.trial import Trial
from resources.metadata.database import Database
from resources.metadata.field_rules import MetricPoint
from resources.metadata.outbox import read_after
from resources.metadata.tracking.run_data import RunData
from sensors.run_sweeps import run_sweeps
from tests.resources.hpo.sweep_files import sweep
from tests.support.sensors.sensor_harness import SensorHarness


class Search:
    """A control plane with one sweep."""

    def __init__(self, harness: SensorHarness, **changes: Any) -> None:
        self.harness = harness
        self.sweeps = Sweeps(harness.plane.database)
        self.id = self.sweeps.start(sweep(**changes), user="ann", organization="default").id

    def look(self) -> Snapshot:
        self.harness.tick(run_sweeps)
        return self.sweeps.snapshot(self.id)

    def cancel(self) -> None:
        cancel_sweep(self.harness.plane.database, self.harness.plane.store, self.id)

    @property
    def trials(self) -> tuple[Trial, ...]:
        return self.sweeps.snapshot(self.id).trials

    def statuses(self) -> list[str]:
        return [trial.status for trial in self.trials]

    def log(self, number: int, value: float, step: int = 40, time: int = 1) -> None:
        point = MetricPoint("eval/loss", value, step, time)
        RunData(self.harness.plane.database).log_metric(self.trials[number].job_id, point)

    def complete(self, number: int, value: float) -> None:
        """Complete a trial as the checkpoint asset does: metrics first, then job and artifacts."""
        job = self.trials[number].job_id
        self.harness.plane.jobs.start(job)
        self.log(number, value)
        adapter = Artifact(kind="adapter", uri=f"s3://hanzo-ml/runs/{job}/a", digest=f"{number:064d}", size_bytes=1)
        with self.harness.plane.database.write() as connection:
            self.harness.plane.jobs.complete(connection, job, {"adapter": adapter}, 1.0)

    def events(self, *types: str) -> list[dict[str, Any]]:
        with self.harness.plane.database.read() as connection:
            return [dict(found.payload) for found in read_after(connection, 0, types=types, limit=1000)]


class Killed(BaseException):
    """Simulated death of the process at a database statement."""


class Cut:
    """Raise `Killed` at the database statement number `place`."""

    def __init__(self, database: Database, place: int) -> None:
        self.engine, self.left = database.engine, place

    def __enter__(self) -> None:
        event.listen(self.engine, "before_cursor_execute", self.count)

    def __exit__(self, *_: object) -> None:
        event.remove(self.engine, "before_cursor_execute", self.count)

    def count(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
