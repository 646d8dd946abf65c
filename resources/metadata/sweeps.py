"""Sweeps and their trials as rows. Whatever changes one writes its event in the same transaction.

A sweep's id is its parent run's; a trial's job has the id of its child run. What a sweep does next is decided elsewhere
(`resources.hpo.step`): this is where it is made to be so, all of it or nothing.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, insert, select, update

from resources.errors import conflict, not_found
from resources.hpo.config import SweepConfig
from resources.hpo.step import Step
from resources.hpo.trial import ENDS_AS, Trial, ranked
from resources.hpo.trial_job import trial_job
from resources.metadata.database import Database
from resources.metadata.jobs import ENDED, Jobs
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import jobs as job_table
from resources.metadata.tables import sweep_trials, sweeps
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs
from resources.metadata.tracking_rules import MetricPoint

PARENT_TAG = "mlflow.parentRunId"
SWEEP_KEY, START_KEY = "sweep", "start"
"""Keys of a trial's job: the sweep that it belongs to, and the artifact whose weights it starts from."""


@dataclass(frozen=True)
class Sweep:
    """A row of the sweeps table; times in milliseconds."""

    id: str
    experiment: str
    status: str
    config: SweepConfig
    user_id: str
    organization: str
    reason: str
    created_at: int
    ended_at: int | None


@dataclass(frozen=True)
class Snapshot:
    """A sweep, its trials by number, and the status and reason of each one's job."""

    sweep: Sweep
    trials: tuple[Trial, ...]
    jobs: tuple[tuple[str, str], ...]


class Sweeps:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._jobs = Jobs(database)
        self._runs = Runs(database)
        self._run_data = RunData(database)

    def start(self, config: SweepConfig, *, user: str, organization: str) -> Sweep:
        """Record a sweep and its parent run. Its trials come later, as jobs."""
        identifier, now = uuid.uuid4().hex, now_ms()
        with self._database.write() as connection:
            name = f"{config.strategy} sweep"
            self._runs.ensure(
                identifier, config.experiment, name, user, organization, status="running", connection=connection
            )
            facts = {
                "strategy": config.strategy,
                "objective": f"{config.objective.direction} {config.objective.metric}",
                "max_trials": str(config.wanted_trials),
                "max_concurrent_trials": str(config.max_concurrent_trials),
            }
            self._run_data.log_batch(identifier, params=list(facts.items()), connection=connection)
            row = {
                "id": identifier,
                "experiment": config.experiment,
                "status": "running",
                "config": config.model_dump(mode="json"),
                "user_id": user,
                "organization": organization,
                "reason": "",
                "created_at": now,
            }
            connection.execute(insert(sweeps).values(**row))
            emit(connection, "jobs", "sweep.started", identifier, {"sweep_id": identifier, "user_id": user, **facts})
            return self.get(identifier, connection)

    def get(self, identifier: str, connection: Connection) -> Sweep:
        row = connection.execute(select(sweeps).where(sweeps.c.id == identifier)).mappings().first()
        if row is None:
            raise not_found(f"there is no sweep '{identifier}': see `hanzo-ml hpo list`")
        return sweep_of(row)

    def list(self, organization: str, status: str | None = None) -> Sequence[Sweep]:
        """Sweeps, newest first."""
        query = select(sweeps).where(sweeps.c.organization == organization).order_by(sweeps.c.created_at.desc())
        if status is not None:
            query = query.where(sweeps.c.status == status)
        with self._database.read() as connection:
            return [sweep_of(row) for row in connection.execute(query).mappings()]

    def running(self) -> Sequence[str]:
        """The ids of all sweeps that go on, oldest first."""
        query = select(sweeps.c.id).where(sweeps.c.status == "running").order_by(sweeps.c.created_at)
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def snapshot(self, identifier: str, *, connection: Connection | None = None) -> Snapshot:
        """The sweep as it stands."""
        if connection is None:
            with self._database.read() as reader:
                return self.snapshot(identifier, connection=reader)
        columns = (*(sweep_trials.c[field.name] for field in fields(Trial)), job_table.c.status, job_table.c.reason)
        names = (*(field.name for field in fields(Trial)), "job_status", "job_reason")
        query = (
            select(*(column.label(name) for column, name in zip(columns, names, strict=True)))
            .join(job_table, job_table.c.id == sweep_trials.c.job_id)
            .where(sweep_trials.c.sweep_id == identifier)
            .order_by(sweep_trials.c.number)
        )
        sweep = self.get(identifier, connection)
        rows = [dict(row) for row in connection.execute(query).mappings()]
        states = tuple((row.pop("job_status"), row.pop("job_reason")) for row in rows)
        return Snapshot(sweep, tuple(Trial(**row) for row in rows), states)

    def take(self, before: Snapshot, step: Step) -> bool:
        """Do what was decided of `before`: trials, their jobs and runs, and all events in one transaction.

        Returns False, and does nothing, where the sweep is not as it was then: somebody else was faster, or a job went on.
        """
        with self._database.write() as connection:
            # Of two who look at once, the second waits here, and then finds that nothing is as he saw it.
            connection.execute(select(sweeps.c.id).where(sweeps.c.id == before.sweep.id).with_for_update())
            if self.snapshot(before.sweep.id, connection=connection) != before:
                return False
            for trial in step.changed:
                self._change(connection, before.sweep, trial)
            for trial in step.asked:
                self._start_trial(connection, before, trial)
            if step.end is not None:
                after = {trial.number: trial for trial in (*before.trials, *step.changed)}
                self._end(connection, before.sweep, tuple(after.values()), step.end.status, step.end.reason)
            return True

    def cancel(self, identifier: str) -> Sweep:
        """End a sweep that goes on, with the jobs of its trials."""
        with self._database.write() as connection:
            connection.execute(select(sweeps.c.id).where(sweeps.c.id == identifier).with_for_update())
            found = self.snapshot(identifier, connection=connection)
            if found.sweep.status != "running":
                raise conflict(f"sweep '{identifier}' is {found.sweep.status} already")
            reason, now = "its sweep was cancelled", now_ms()
            after = []
            for trial, (job_status, _) in zip(found.trials, found.jobs, strict=True):
                if job_status not in ENDED:
                    self._jobs.cancel(trial.job_id, reason, connection=connection)
                if not trial.has_ended:
                    values = {
                        "status": ENDS_AS.get(trial.status, "cancelled"),
                        "reason": trial.reason or reason,
                        "ended_at": now,
                    }
                    trial = Trial(**{**asdict(trial), **values})
                    self._change(connection, found.sweep, trial)
                after.append(trial)
            self._end(connection, found.sweep, after, "cancelled", "cancelled by the user")
            return self.get(identifier, connection)

    def _start_trial(self, connection: Connection, before: Snapshot, trial: Trial) -> None:
        """The trial's run, job and row."""
        sweep = before.sweep
        config = {**trial_job(sweep.config, trial.params), SWEEP_KEY: sweep.id}
        if trial.start_from is not None:
            source = self._jobs.get(before.trials[trial.start_from].job_id, connection)
            config[START_KEY] = source.trained.model_dump(mode="json")
        tags = {PARENT_TAG: sweep.id}
        name = f"trial-{trial.number}"
        who = (sweep.user_id, sweep.organization)
        self._runs.ensure(trial.job_id, sweep.experiment, name, *who, tags, connection=connection)
        self._jobs.submit(
            name=config["name"],
            config=config,
            user=sweep.user_id,
            organization=sweep.organization,
            id=trial.job_id,
            connection=connection,
        )
        connection.execute(insert(sweep_trials).values(sweep_id=sweep.id, **row_of(trial)))
        emit(connection, "jobs", "trial.started", trial.job_id, event_of(sweep, trial))

    def _change(self, connection: Connection, sweep: Sweep, trial: Trial) -> None:
        row = row_of(trial)
        here = (sweep_trials.c.sweep_id == sweep.id) & (sweep_trials.c.number == trial.number)
        connection.execute(update(sweep_trials).where(here).values(**row))
        emit(connection, "jobs", f"trial.{trial.status}", trial.job_id, event_of(sweep, trial))
        if trial.status == "pruning":
            self._jobs.cancel(trial.job_id, f"its sweep stopped it: {trial.reason}", connection=connection)
        if trial.counts and trial.value is not None:
            point = MetricPoint(sweep.config.objective.metric, trial.value, trial.number, now_ms())
            self._run_data.log_metric(sweep.id, point, connection=connection)

    def _end(self, connection: Connection, sweep: Sweep, trials: Sequence[Trial], status: str, reason: str) -> None:
        values = {"status": status, "reason": reason, "ended_at": now_ms()}
        connection.execute(update(sweeps).where(sweeps.c.id == sweep.id).values(**values))
        self._runs.set_status(sweep.id, status, connection=connection)
        best = next(iter(ranked(trials, sweep.config.objective.direction)), None)
        facts = {"sweep_id": sweep.id, "reason": reason, "best": event_of(sweep, best) if best else None}
        emit(connection, "jobs", f"sweep.{status}", sweep.id, facts)


def sweep_of(row: Mapping[Any, Any]) -> Sweep:
    return Sweep(**{**row, "config": SweepConfig.model_validate(row["config"])})


def row_of(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial), "params": dict(trial.params)}


def event_of(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    return {
        "sweep_id": sweep.id,
        "job_id": trial.job_id,
        "trial": trial.number,
        "status": trial.status,
        "params": dict(trial.params),
        "value": trial.value,
        "reason": trial.reason,
    }
