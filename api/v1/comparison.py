"""Runs side by side (row E9): what each was given and reached, and where they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.schemas.v1.runs import run_json
from resources.metadata.tracking.logged_runs import LoggedRun

SHOWN = ("id", "name", "experiment_id", "status", "start_time", "end_time", "git_commit", "params")


def comparison(found: Sequence[LoggedRun]) -> dict[str, Any]:
    """The runs in their order; and by key the values of all, where they are not the same: null where a run has none."""
    runs = [side(logged) for logged in found]
    return {"runs": runs, "differences": {kind: differing([run[kind] for run in runs]) for kind in ("params", "metrics")}}


def side(logged: LoggedRun) -> dict[str, Any]:
    run, document = logged.run, run_json(logged)
    return {
        **{name: document[name] for name in SHOWN},
        "duration_seconds": None
        if run.start_time is None or run.end_time is None
        else (run.end_time - run.start_time) / 1000,
        "gpu_hours": document["system_metrics"]["total_gpu_hours"],
        "metrics": {point["key"]: point["value"] for point in document["metrics"]},
    }


def differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = {key: [side.get(key) for side in sides] for key in sorted(set().union(*sides))}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}
