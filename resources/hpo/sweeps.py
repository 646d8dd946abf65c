"""Sweeps and their trials in the database.

Each change writes its event in the same transaction. A sweep's id is its parent run's; a trial's job has the id of its child
run. `resources.hpo.sweep_step` decides the next step of a sweep; this module applies it, as a whole or not at all.
"""

import logging
import uuid
from collections.abc import Collection, Mapping, Sequence

from pydantic import ValidationError
from sqlalchemy import Connection, insert, select, update

from recipes.contracts.validation_errors import explain_first_error
from resources.errors import invalid
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.sweep_rows import (
    JobState,
    Snapshot,
    Sweep,
    parse_sweep,
    read_snapshot,
    read_trials,
    trial_event,
    trial_row,
)
from resources.hpo.sweep_step import CANCELLED_REASON, End, Step
from resources.hpo.trial import Trial, rank_trials
from resources.hpo.trial_job import build_trial_job
from resources.metadata.database import Database
from resources.metadata.field_rules import PARENT_TAG, MetricPoint, refuse_unstorable
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.jobs import ENDED_STATUSES, Jobs
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import jobs as job_table
from resources.metadata.tables import runs, sweep_trials, sweeps
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking.runs import Runs

log = logging.getLogger(__name__)

MAX_PAGE = 100
"""Maximum number of sweeps in a page, each with all its trials."""
MAX_TRIALS = 1000
STATUSES = ("running", "completed", "failed", "cancelled")
SWEEP_KEY, START_KEY = "sweep", "start"
"""Keys of a trial's job: its sweep, and the artifact with the weights from which it starts."""


class Sweeps:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._jobs = Jobs(database)
        self._runs = Runs(database)
        self._run_data = RunData(database)

    def start(self, config: SweepConfig, *, user: str, organization: str, id: str | None = None) -> Sweep:
        """Record a sweep and its parent run. Trials are started later, as jobs.

        If a sweep with this `id` exists, it is returned unchanged.
        """
        identifier, now = id or uuid.uuid4().hex, now_ms()
        asked = config.model_dump(mode="json")
        refuse_unstorable(asked, "config")
        with self._database.write() as connection:
            name = f"{config.strategy} sweep"
            self._runs.ensure(
                identifier, config.experiment, name, user, organization, status="running", connection=connection
            )
            # After its run exists: of two concurrent calls, the second has waited for the first.
            if sweep_exists(identifier, connection):
                return read_snapshot(identifier, connection).sweep
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
                "config": asked,
                "user_id": user,
                "organization": organization,
                "reason": "",
                "created_at": now,
            }
            connection.execute(insert(sweeps).values(**row))
            emit(connection, "jobs", "sweep.started", identifier, {"sweep_id": identifier, "user_id": user, **facts})
            return read_snapshot(identifier, connection).sweep

    def page(
        self, organization: str, status: str | None = None, *, limit: int = MAX_PAGE, page_token: str | None = None
    ) -> tuple[Sequence[Sweep], str | None]:
        """Return sweeps, newest first, and the token of the next page.

        One that cannot be read is logged and left out.
        """
        if status is not None and status not in STATUSES:
            raise invalid(f"status '{status[:100]}' is unknown: use one of {', '.join(STATUSES)}")
        query = select(sweeps).where(sweeps.c.organization == organization)
        if status is not None:
            query = query.where(sweeps.c.status == status)
        order = Keyset([SortKey(sweeps.c.created_at, False, int), SortKey(sweeps.c.id, False, str)], (organization, status))
        with self._database.read() as connection:
            rows = connection.execute(order.page(query, limit, page_token)).all()
        columns, found = tuple(sweeps.c.keys()), []
        for values in rows[:limit]:
            row = dict(zip(columns, values, strict=False))
            try:
                found.append(parse_sweep(row))
            except ValidationError as error:  # it was started by another release, or edited by hand
                log.error("sweep %s cannot be read: %s", row["id"], explain_first_error(error, SweepConfig))
        return found, order.next_token(rows, limit)

    def set_dataset(self, identifier: str, reference: str) -> None:
        """Pin the dataset version of a sweep that named none."""
        with self._database.write() as connection:
            connection.execute(select(sweeps.c.id).where(sweeps.c.id == identifier).with_for_update())
            config = read_snapshot(identifier, connection).sweep.config
            pinned = config.model_copy(update={"base_config": {**config.base_config, "dataset": reference}})
            values = {"config": pinned.model_dump(mode="json")}
            connection.execute(update(sweeps).where(sweeps.c.id == identifier).values(**values))

    def running(self) -> Sequence[str]:
        """Return the ids of all running sweeps, oldest first."""
        query = select(sweeps.c.id).where(sweeps.c.status == "running").order_by(sweeps.c.created_at)
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def exists(self, identifier: str) -> bool:
        with self._database.read() as connection:
            return sweep_exists(identifier, connection)

    def snapshot(self, identifier: str) -> Snapshot:
        """Return the current state of a sweep."""
        with self._database.read() as connection:
            return read_snapshot(identifier, connection)

    def trials(
        self, identifier: str, *, limit: int = MAX_TRIALS, page_token: str | None = None
    ) -> tuple[list[tuple[Trial, JobState]], str | None]:
        """Call `read_trials` in a transaction of its own."""
        with self._database.read() as connection:
            return read_trials(identifier, connection, limit, page_token)

    def apply_step(self, snapshot: Snapshot, step: Step) -> bool:
        """Apply a step that was decided for `snapshot`, in one transaction.

        The transaction includes trials, jobs, runs and events.

        Returns False, and changes nothing, if the sweep has changed since the snapshot, by another process or a job's
        progress.
        """
        identifier, stopped = snapshot.sweep.id, jobs_to_stop(snapshot, step)
        with self._database.write() as connection:
            # Of two concurrent calls, the second waits here, and then finds that the snapshot is outdated.
            connection.execute(select(sweeps.c.id).where(sweeps.c.id == identifier).with_for_update())
            lock_jobs_and_runs(connection, stopped, [identifier, *stopped])
            if read_snapshot(identifier, connection) != snapshot:
                return False
            for trial in step.changed:
                self._change(connection, snapshot, trial)
            self._log_best(connection, snapshot, step.changed)
            for job, reason in stopped.items():
                self._jobs.cancel(job, reason, connection=connection)
            for trial in step.new_trials:
                self._start_trial(connection, snapshot, trial)
            if step.end is not None:
                after = {trial.number: trial for trial in (*snapshot.trials, *step.changed)}
                self._end(connection, snapshot.sweep, tuple(after.values()), step.end)
            return True

    def _start_trial(self, connection: Connection, snapshot: Snapshot, trial: Trial) -> None:
        """Create the trial's run, job and row."""
        sweep = snapshot.sweep
        config = {**build_trial_job(sweep.config, trial.params, trial.generation), SWEEP_KEY: sweep.id}
        if trial.start_from is not None:
            source = self._jobs.get(snapshot.trials[trial.start_from].job_id, connection)
            config[START_KEY] = source.trained.model_dump(mode="json")
        name = f"trial-{trial.number}"
        # In its parent's experiment, not in the experiment of that name, which may have been renamed.
        self._runs.create(
            snapshot.experiment_id,
            run_id=trial.job_id,
            name=name,
            user_id=sweep.user_id,
            tags={PARENT_TAG: sweep.id},
            status="queued",
            connection=connection,
        )
        self._jobs.submit(
            name=config["name"],
            config=config,
            user=sweep.user_id,
            organization=sweep.organization,
            id=trial.job_id,
            connection=connection,
        )
        connection.execute(insert(sweep_trials).values(sweep_id=sweep.id, **trial_row(trial)))
        emit(connection, "jobs", "trial.started", trial.job_id, trial_event(sweep, trial))

    def _change(self, connection: Connection, snapshot: Snapshot, trial: Trial) -> None:
        sweep = snapshot.sweep
        here = (sweep_trials.c.sweep_id == sweep.id) & (sweep_trials.c.number == trial.number)
        connection.execute(update(sweep_trials).where(here).values(**trial_row(trial)))
        emit(connection, "jobs", f"trial.{trial.status}", trial.job_id, trial_event(sweep, trial))

    def _log_best(self, connection: Connection, snapshot: Snapshot, changed: Sequence[Trial]) -> None:
        """Log the best value so far to the sweep's run.

        It is logged after each trial with a result, in the order in which they ended.

        A run shows the value of its highest step: with the trials' own numbers and values, that was the last trial's value.
        """
        objective, counted = snapshot.sweep.config.objective, [trial for trial in snapshot.trials if trial.has_result]
        for trial in changed:
            if not trial.has_result or snapshot.is_deleted:
                continue
            counted.append(trial)
            best = rank_trials(counted, objective.direction)[0]
            assert best.value is not None  # `has_result` requires a value
            point = MetricPoint(objective.metric, best.value, len(counted) - 1, now_ms())
            self._run_data.log_metric(snapshot.sweep.id, point, connection=connection)

    def _end(self, connection: Connection, sweep: Sweep, trials: Sequence[Trial], end: End) -> None:
        values = {"status": end.status, "reason": end.reason, "ended_at": now_ms()}
        connection.execute(update(sweeps).where(sweeps.c.id == sweep.id).values(**values))
        self._runs.follow_job(sweep.id, end.status, connection)  # its run may be deleted
        order = rank_trials(trials, sweep.config.objective.direction)
        best = next((trial_event(sweep, trial) for trial in order), None)
        # A trial that was stopped early has left no weights: the best of the others is evaluated.
        trained = next((trial_event(sweep, trial) for trial in order if trial.status == "completed"), None)
        facts = {"sweep_id": sweep.id, "reason": end.reason, "best": best, "best_completed": trained}
        emit(connection, "jobs", f"sweep.{end.status}", sweep.id, facts)


def sweep_exists(identifier: str, connection: Connection) -> bool:
    return connection.execute(select(sweeps.c.id).where(sweeps.c.id == identifier)).first() is not None


def jobs_to_stop(snapshot: Snapshot, step: Step) -> Mapping[str, str]:
    """Return the jobs that a step ends, with the reason.

    These are the jobs of stopped trials, or all if the sweep is cancelled.
    """
    if step.end is not None and step.end.status == "cancelled":
        states = zip(snapshot.trials, snapshot.jobs, strict=True)
        return {trial.job_id: CANCELLED_REASON for trial, (status, _) in states if status not in ENDED_STATUSES}
    return {trial.job_id: f"its sweep stopped it: {trial.reason}" for trial in step.changed if trial.status == "pruning"}


def lock_jobs_and_runs(connection: Connection, job_ids: Collection[str], run_ids: Collection[str]) -> None:
    """Lock these jobs and runs until the transaction ends.

    Jobs first, in the order that all code uses. Called before the first event is written: from then on the order of all
    events is locked (`lock_event_order`), and the transaction that holds a row may be about to write an event too.
    PostgreSQL ends such a deadlock with an error in one of them.
    """
    for table, ids in ((job_table, job_ids), (runs, run_ids)):
        rows = select(table.c.id).where(table.c.id.in_(ids)).order_by(table.c.id)
        connection.execute(rows.with_for_update(key_share=True)).all()
