"""What requests want to log to runs, and what becomes of it: which are refused, and which rows change.

Pure: no database. Many requests are decided at once, in their order, so that one transaction carries them all; what a
request is refused for touches no other. How rows are read and written is in `sqlite` and `postgresql_batches`.
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
"""Characters of a param's value in a refusal, which may have to show a hundred of them."""

Key = tuple[str, str]
"""A run and the key of a metric, a param or a tag in it."""
Value = tuple[int, int, float, bool]
"""Step, timestamp, value and is_nan: a row of `metrics` without its series."""
Points = dict[str, list[Value]]
"""What a request logs, by the key of the metric. A thousand points have few keys, so what is done by key is done seldom."""
point_age = itemgetter(0, 1, 2)
"""What the newest value of a series is the largest by; of two alike it is the first."""


class RunWrite(msgspec.Struct, frozen=True, gc=False):
    """One request, valid by itself (`run_write` makes it): all of it is stored or nothing.

    A struct, because each logged metric makes two.
    """

    run_id: str
    points: Points
    params: dict[str, str]
    tags: dict[str, str]
    organization: str | None
    """Whose runs the caller may write to; None for the product itself, which may write to all."""
    tally: Tally | None = None
    """Where the call is counted, in the transaction that stores what it wants; None where it is on record otherwise."""
    batch: bool = True
    """Whether it is a batch, of which an error names all params that would change."""

    @property
    def size(self) -> int:
        return sum(map(len, self.points.values())) + len(self.params) + len(self.tags)

    def with_tally(self, tally: Tally) -> "RunWrite":
        return structs.replace(self, tally=tally)

    @property
    def is_point(self) -> bool:
        """One metric's value, and nothing else."""
        return len(self.points) == 1 and self.size == 1


class RunRow(NamedTuple):
    lifecycle_stage: str
    organization: str


class Series(NamedTuple):
    """The row of `latest_metrics`: the number of the series and its newest value."""

    id: int
    newest: Value


@dataclass(frozen=True)
class WantedRows:
    """The rows that a group of writes depends on. Sorted, so that groups which lock rows cannot wait for each other."""

    runs: list[str]
    params: list[Key]
    series: list[Key]


@dataclass(frozen=True)
class KnownRows:
    """Those of the wanted rows that exist."""

    runs: dict[str, RunRow]
    params: dict[Key, str]
    series: dict[Key, Series]


@dataclass
class Changes:
    """The rows to write. Points are kept once each; `fresh` ones lie behind every stored point of their series.

    `runs` are those of which something changes.
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
    """For each write in its place: why it is refused, or None."""
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
    """A request that is valid as far as that can be told without the database.

    `batch` says how errors name its parts, and that what can be no run id is refused: MLflow's other calls do not find it.
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
    """`run_write` of points that are by their keys already."""
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
    """Params of one request, each key once."""
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
    """Take the writes one after another, each as if those before it were stored already."""
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
    # A run of another organization does not exist for the caller: its message must not tell the two apart.
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
    """In MLflow's words, which differ for a param that comes alone and for those of a batch, all of which are named."""
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
        # As in MLflow, no run loses its name: the tag would be empty, and the name would not.
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
        # The newest stored value is the largest, so what is larger is not stored yet. NaN counts as 0.0, as in MLflow.
        newest = (*series.newest[:3], True)
        fresh = [value for value in values if value > newest]
        if len(fresh) < len(values):
            changes.other.setdefault(name, {}).update((value, None) for value in values if value <= newest)
    if not fresh:
        return
    changes.fresh.setdefault(name, {}).update(dict.fromkeys(fresh))
    largest = max(fresh)
    if largest[3]:  # of a NaN and a zero that are as old, the larger tuple need not be the first
        largest = max(fresh, key=point_age)
    best = changes.newest.get(name)
    if best is None or point_age(largest) > point_age(best):
        changes.newest[name] = largest
