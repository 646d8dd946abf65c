"""Decide which log requests are accepted, and which rows they change.

Pure: no database. Many requests are decided together, in their order, so that one transaction stores them all; a refused
request does not affect the others. `sqlite` and `postgresql_batches` read and write the rows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec import structs

from resources.errors import HanzoError, invalid, not_found
from resources.metadata.audit_log import Tally
from resources.metadata.field_rules import (
    MAX_RUN_NAME,
    NAME_TAG,
    MetricPoint,
    checked_param,
    checked_run_id,
    checked_run_tag,
    checked_text,
)

MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_TAGS = 100
MAX_ENTITIES = 1000
MAX_SHOWN = 250
"""Maximum length of a param's value in an error, which may show a hundred of them."""

Key = tuple[str, str]
"""A run id, and the key of a metric, param or tag."""
Value = tuple[int, int, float, bool]
"""Step, timestamp, value and is_nan: a row of `metrics` without its series."""
Points = dict[str, list[Value]]
"""Points of a request by metric key: a thousand points have few keys, so work per key is rare."""
point_age = itemgetter(0, 1, 2)
"""The newest value of a series is the largest by this key; the first of equal ones."""


class RunWrite(msgspec.Struct, frozen=True, gc=False):
    """One valid request (see `run_write`), stored completely or not at all.

    A struct, because each logged metric creates two.
    """

    run_id: str
    points: Points
    params: dict[str, str]
    tags: dict[str, str]
    organization: str | None
    """Organization whose runs may be written; None for the product itself, which may write to all."""
    tally: Tally | None = None
    """Count of the call, updated in the same transaction; None if the call is audited elsewhere."""
    batch: bool = True
    """Whether it is a batch, whose errors name all params that would change."""

    @property
    def size(self) -> int:
        return sum(map(len, self.points.values())) + len(self.params) + len(self.tags)

    def with_tally(self, tally: Tally) -> "RunWrite":
        return structs.replace(self, tally=tally)

    @property
    def is_point(self) -> bool:
        """Whether it is a single metric value and nothing else."""
        return len(self.points) == 1 and self.size == 1


class RunRow(NamedTuple):
    lifecycle_stage: str
    organization: str


class Series(NamedTuple):
    """A row of `latest_metrics`: the series number and its newest value."""

    id: int
    newest: Value


@dataclass(frozen=True)
class WantedRows:
    """Rows on which a group of writes depends; sorted, so that locking cannot deadlock."""

    runs: list[str]
    params: list[Key]
    series: list[Key]


@dataclass(frozen=True)
class KnownRows:
    """The wanted rows that exist."""

    runs: dict[str, RunRow]
    params: dict[Key, str]
    series: dict[Key, Series]


@dataclass
class Changes:
    """The rows to write, each point once. `runs` are those with any change.

    `fresh` points are newer than every stored point of their series.
    """

    runs: set[str] = field(default_factory=set)
    params: dict[Key, str] = field(default_factory=dict)
    tags: dict[Key, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    newest: dict[Key, Value] = field(default_factory=dict)
    fresh: dict[Key, dict[Value, None]] = field(default_factory=dict)
    other: dict[Key, dict[Value, None]] = field(default_factory=dict)
    tallies: Counter[Tally] = field(default_factory=Counter)


@dataclass(frozen=True)
class Decision:
    refusals: list[HanzoError | None]
    """For each write, in order: why it is refused, or None."""
    changes: Changes


def run_write(
    run_id: str,
    metrics: Sequence[MetricPoint] = (),
    params: Sequence[Key] = (),
    tags: Sequence[Key] = (),
    organization: str | None = None,
    *,
    batch: bool = True,
) -> RunWrite:
    """Return a request, validated as far as possible without the database.

    `batch` determines how errors name its parts, and whether an invalid run id is refused: MLflow's other calls report it
    as not found.
    """
    return run_write_from_points(run_id, group_points(metrics), params, tags, organization, batch=batch)


def group_points(metrics: Iterable[MetricPoint]) -> Points:
    points: Points = {}
    for metric in metrics:
        points.setdefault(metric.key, []).append((metric.step, metric.timestamp, metric.value, metric.is_nan))
    return points


def run_write_from_points(
    run_id: str,
    points: Points,
    params: Sequence[Key] = (),
    tags: Sequence[Key] = (),
    organization: str | None = None,
    *,
    batch: bool = True,
) -> RunWrite:
    """Call `run_write` with points that are grouped by key already."""
    check_batch(sum(map(len, points.values())), len(params), len(tags))
    new_params = unique_params(
        checked_param(key, value, f"params[{index}]" if batch else "") for index, (key, value) in enumerate(params)
    )
    new_tags = dict(
        checked_run_tag(key, value, f"tags[{index}]" if batch else "") for index, (key, value) in enumerate(tags)
    )
    identifier = checked_run_id(run_id) if batch else checked_text(run_id, "run_id")
    return RunWrite(identifier, points, new_params, new_tags, organization, batch=batch)


def check_batch(metrics: int, params: int, tags: int) -> None:
    counts = (
        ("metrics", MAX_METRICS, metrics),
        ("params", MAX_PARAMS, params),
        ("tags", MAX_TAGS, tags),
        ("metrics, params, and tags", MAX_ENTITIES, metrics + params + tags),
    )
    for name, limit, count in counts:
        if count > limit:
            raise invalid(
                f"A batch logging request can contain at most {limit} {name}. Got {count} {name}. "
                f"Please split up {name} across multiple requests and try again."
            )


def unique_params(pairs: Iterable[Key]) -> dict[str, str]:
    """Return the params of one request; duplicate keys are refused."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if key in found:
            raise invalid(
                f"Duplicate parameter keys have been submitted: {[key]}. Please ensure the request contains "
                "only one param value per param key."
            )
        found[key] = value
    return found


def check_run_active(run_id: str, lifecycle_stage: str) -> None:
    if lifecycle_stage != "active":
        raise invalid(f"The run {run_id} must be in the 'active' state. Current state is {lifecycle_stage}.")


def run_not_found(run_id: str) -> HanzoError:
    return not_found(f"Run with id={run_id} not found")


def wanted_rows(writes: Iterable[RunWrite]) -> WantedRows:
    runs: set[str] = set()
    params: set[Key] = set()
    series: set[Key] = set()
    for write in writes:
        run_id = write.run_id
        runs.add(run_id)
        params.update([(run_id, key) for key in write.params])
        series.update([(run_id, key) for key in write.points])
    return WantedRows(sorted(runs), sorted(params), sorted(series))


def decide_writes(writes: Sequence[RunWrite], known: KnownRows) -> Decision:
    """Decide the writes in order, each as if the accepted ones before it were stored."""
    changes = Changes()
    refusals: list[HanzoError | None] = []
    for write in writes:
        try:
            _check(write, known, changes)
        except HanzoError as refusal:
            refusals.append(refusal)
        else:
            refusals.append(None)
            _accept(write, known, changes)
    return Decision(refusals, changes)


def _check(write: RunWrite, known: KnownRows, changes: Changes) -> None:
    run = known.runs.get(write.run_id)
    # To the caller, a run of another organization does not exist: the error must be the same.
    if run is None or write.organization not in (None, run.organization):
        raise run_not_found(write.run_id)
    check_run_active(write.run_id, run.lifecycle_stage)
    clashes = []
    for key, value in write.params.items():
        name = (write.run_id, key)
        old = known.params.get(name, changes.params.get(name))
        if old is not None and old != value:
            clashes.append({"key": key, "old_value": old[:MAX_SHOWN], "new_value": value[:MAX_SHOWN]})
    if clashes:
        raise changed_params_error(write, clashes)


def changed_params_error(write: RunWrite, clashes: list[dict[str, str]]) -> HanzoError:
    """Return MLflow's error for changed params; its text differs for a batch, which lists all."""
    if not write.batch:
        key, old, new = clashes[0].values()
        return invalid(
            f"Changing param values is not allowed. Param with key='{key}' was already logged with value='{old}' "
            f"for run ID='{write.run_id}'. Attempted logging new value '{new}'."
        )
    return invalid(
        f"Changing param values is not allowed. Params were already logged='{clashes}' for run ID='{write.run_id}'."
    )


def _accept(write: RunWrite, known: KnownRows, changes: Changes) -> None:
    run_id = write.run_id
    changes.runs.add(run_id)
    if write.tally:
        changes.tallies[write.tally] += 1
    for key, value in write.params.items():
        if (run_id, key) not in known.params:
            changes.params[run_id, key] = value
    for key, value in write.tags.items():
        # As in MLflow, an empty name tag is ignored: the run keeps its name.
        if value or key != NAME_TAG:
            changes.tags[run_id, key] = value
    if write.tags.get(NAME_TAG):
        changes.names[run_id] = write.tags[NAME_TAG][:MAX_RUN_NAME]
    for key, values in write.points.items():
        _accept_points((run_id, key), values, known, changes)


def _accept_points(name: Key, values: list[Value], known: KnownRows, changes: Changes) -> None:
    series = known.series.get(name)
    fresh = values
    if series is not None:
        # The newest stored value is the largest, so larger ones are not stored yet. NaN counts as 0.0, as in MLflow.
        newest = (*series.newest[:3], True)
        fresh = [value for value in values if value > newest]
        if len(fresh) < len(values):
            changes.other.setdefault(name, {}).update((value, None) for value in values if value <= newest)
    if not fresh:
        return
    changes.fresh.setdefault(name, {}).update(dict.fromkeys(fresh))
    largest = max(fresh)
    if largest[3]:  # a NaN and a zero may be equally old, then the larger tuple need not be the first
        largest = max(fresh, key=point_age)
    best = changes.newest.get(name)
    if best is None or point_age(largest) > point_age(best):
        changes.newest[name] = largest
