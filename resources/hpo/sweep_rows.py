"""A sweep and its trials as rows: types, queries and events."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, Select, or_, select

from resources.errors import HanzoError, not_found
from resources.hpo.sweep_config import SweepConfig
from resources.hpo.trial import Trial
from resources.metadata.filters.pagination import Keyset, SortKey
from resources.metadata.tables import experiments, runs, sweep_trials, sweeps
from resources.metadata.tables import jobs as job_table


@dataclass(frozen=True)
class Sweep:
    """A row of the sweeps table; times in milliseconds since 1970."""

    id: str
    experiment: str
    status: str
    config: SweepConfig
    user_id: str
    organization: str
    reason: str
    created_at: int
    ended_at: int | None


TRIAL_COLUMNS = tuple(field.name for field in fields(Trial))
JobState = tuple[str, str]
"""Status and reason of a trial's job."""


@dataclass(frozen=True)
class Snapshot:
    """A sweep, its trials by number, and the status and reason of each trial's job.

    `experiment_id` is that of its run, even if the experiment was renamed; `is_deleted` is true if either was deleted.
    """

    sweep: Sweep
    experiment_id: int
    is_deleted: bool
    trials: tuple[Trial, ...]
    jobs: tuple[JobState, ...]


def read_snapshot(identifier: str, connection: Connection) -> Snapshot:
    """Read a sweep with its trials. Raises HanzoError: there is no such sweep."""
    deleted = or_(runs.c.lifecycle_stage != "active", experiments.c.lifecycle_stage != "active")
    sweep_query = (
        select(sweeps, runs.c.experiment_id, deleted.label("is_deleted"))
        .join(runs, runs.c.id == sweeps.c.id)
        .join(experiments, experiments.c.id == runs.c.experiment_id)
        .where(sweeps.c.id == identifier)
    )
    row = connection.execute(sweep_query).mappings().first()
    if row is None:
        raise sweep_not_found(identifier)
    found = dict(row)
    experiment_id, is_deleted = int(found.pop("experiment_id")), bool(found.pop("is_deleted"))
    trials = [parse_trial(row) for row in connection.execute(trials_query(identifier).order_by(sweep_trials.c.number))]
    only_trials, states = tuple(trial for trial, _ in trials), tuple(state for _, state in trials)
    return Snapshot(parse_sweep(found), experiment_id, is_deleted, only_trials, states)


def read_trials(
    identifier: str, connection: Connection, limit: int, page_token: str | None
) -> tuple[list[tuple[Trial, JobState]], str | None]:
    """Return trials by number, and the token of the next page.

    Raises:
        HanzoError: there is no such sweep.
    """
    if connection.execute(select(sweeps.c.id).where(sweeps.c.id == identifier)).first() is None:
        raise sweep_not_found(identifier)
    order = Keyset([SortKey(sweep_trials.c.number, True, int)], ("trials", identifier))
    rows = connection.execute(order.page(trials_query(identifier), limit, page_token)).all()
    return [parse_trial(row) for row in rows[:limit]], order.next_token(rows, limit)


def trials_query(identifier: str) -> Select[Any]:
    columns = (*(sweep_trials.c[name] for name in TRIAL_COLUMNS), job_table.c.status, job_table.c.reason)
    joined = select(*columns).join(job_table, job_table.c.id == sweep_trials.c.job_id)
    return joined.where(sweep_trials.c.sweep_id == identifier)


def parse_trial(row: Sequence[Any]) -> tuple[Trial, JobState]:
    """Parse a row of `trials_query`, which may have additional columns at its end."""
    return Trial(**dict(zip(TRIAL_COLUMNS, row, strict=False))), (row[len(TRIAL_COLUMNS)], row[len(TRIAL_COLUMNS) + 1])


def sweep_not_found(identifier: str) -> HanzoError:
    return not_found(f"there is no sweep '{identifier}': see `hanzo-ml hpo list`")


def parse_sweep(row: Mapping[Any, Any]) -> Sweep:
    return Sweep(**{**row, "config": SweepConfig.model_validate(row["config"])})


def trial_row(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial), "params": dict(trial.params)}


def trial_event(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    return {
        "sweep_id": sweep.id,
        "job_id": trial.job_id,
        "trial": trial.number,
        "status": trial.status,
        "params": dict(trial.params),
        "value": trial.value,
        "reason": trial.reason,
    }
