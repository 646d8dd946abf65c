"""A sweep and its trials as they stand: the rows, and how they are read and told of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, or_, select

from resources.errors import not_found
from resources.hpo.config import SweepConfig
from resources.hpo.trial import Trial
from resources.metadata.tables import experiments, runs, sweep_trials, sweeps
from resources.metadata.tables import jobs as job_table


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
    """A sweep, its trials by number, and the status and reason of each one's job.

    `experiment_id` is that of its run, whatever the experiment is called by now; `is_deleted`: the run or the experiment is.
    """

    sweep: Sweep
    experiment_id: int
    is_deleted: bool
    trials: tuple[Trial, ...]
    jobs: tuple[tuple[str, str], ...]


def read_snapshot(identifier: str, connection: Connection) -> Snapshot:
    """Raises HanzoError where there is no such sweep."""
    deleted = or_(runs.c.lifecycle_stage != "active", experiments.c.lifecycle_stage != "active")
    of_sweep = (
        select(sweeps, runs.c.experiment_id, deleted.label("is_deleted"))
        .join(runs, runs.c.id == sweeps.c.id)
        .join(experiments, experiments.c.id == runs.c.experiment_id)
        .where(sweeps.c.id == identifier)
    )
    row = connection.execute(of_sweep).mappings().first()
    if row is None:
        raise not_found(f"there is no sweep '{identifier}': see `hanzo-ml hpo list`")
    found = dict(row)
    experiment_id, is_deleted = int(found.pop("experiment_id")), bool(found.pop("is_deleted"))
    columns = (*(sweep_trials.c[field.name] for field in fields(Trial)), job_table.c.status, job_table.c.reason)
    names = (*(field.name for field in fields(Trial)), "job_status", "job_reason")
    of_trials = (
        select(*(column.label(name) for column, name in zip(columns, names, strict=True)))
        .join(job_table, job_table.c.id == sweep_trials.c.job_id)
        .where(sweep_trials.c.sweep_id == identifier)
        .order_by(sweep_trials.c.number)
    )
    trials = [dict(row) for row in connection.execute(of_trials).mappings()]
    states = tuple((row.pop("job_status"), row.pop("job_reason")) for row in trials)
    return Snapshot(sweep_of(found), experiment_id, is_deleted, tuple(Trial(**row) for row in trials), states)


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
