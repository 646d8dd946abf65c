"""A sweep as a study of Optuna's own, for its dashboard, its plots and its importances. Optuna is imported when it is asked
for: a training script has none.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hanzo_ml.cli.connection import Refused, pages

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

HISTORY = "/api/2.0/mlflow/metrics/get-history"
LARGEST = 1.7976931348623157e308
"""What the server says for an infinity, as MLflow does."""
KEPT = ("run_id", "status", "reason", "generation", "member", "start_from")
"""What Optuna has no word for: attributes of each trial."""


def export(sweep: Mapping[str, Any], trials: Sequence[Mapping[str, Any]], storage: str) -> "Study":
    """Write a study of the sweep as it stands into a database. One of the same sweep that is there already is replaced.

    Args:
        storage: an address as SQLAlchemy has them, `sqlite:///study.db`, or the path of a SQLite file.

    Raises:
        Refused: Optuna is not installed, or the database cannot be opened.
    """
    try:
        import optuna
    except ImportError:
        raise Refused("this needs Optuna: `pip install optuna`") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name = f"{sweep['experiment']}-{sweep['id']}"
    objective, space = sweep["objective"], sweep["config"]["search_space"]
    try:
        database = optuna.storages.RDBStorage(storage if "://" in storage else f"sqlite:///{storage}")
        if name in optuna.get_all_study_names(database):
            optuna.delete_study(study_name=name, storage=database)
        study = optuna.create_study(storage=database, study_name=name, direction=objective["direction"])
    except Exception as error:  # of SQLAlchemy, of a driver, or that a driver is not there
        raise Refused(f"--to names no database that Optuna can write to: {str(error).splitlines()[0]}") from None
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        study.set_metric_names([objective["metric"]])
    study.set_user_attr("sweep", sweep["id"])
    study.set_user_attr("strategy", sweep["strategy"])
    distributions = {key: distribution(dimension) for key, dimension in space.items()}
    study.add_trials([told(trial, distributions, evaluations(trial["run_id"], objective["metric"])) for trial in trials])
    return study


def evaluations(run_id: str, metric: str) -> dict[int, float]:
    """The objective by step; of a step that was logged twice the later value."""
    points = pages(HISTORY, "metrics", {"run_id": run_id, "metric_key": metric})
    values = {int(point["step"]): float(point["value"]) for point in points}
    return {step: math.copysign(math.inf, value) if abs(value) >= LARGEST else value for step, value in values.items()}


def told(
    trial: Mapping[str, Any], distributions: Mapping[str, "BaseDistribution"], reached: Mapping[int, float]
) -> "FrozenTrial":
    """A trial in Optuna's words, which has one for all that failed or was cancelled, and one for all that has not ended. Of
    one that was stopped early, what it logged until its processes were gone is left out.
    """
    from optuna.trial import FrozenTrial, TrialState

    states = {"completed": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    ended = trial["ended_at"] is not None
    last = math.inf if trial["step"] is None else trial["step"]
    state = states.get(trial["status"], TrialState.FAIL) if ended else TrialState.RUNNING
    return FrozenTrial(
        number=trial["number"],
        trial_id=0,
        state=state,
        value=trial["value"] if state in states.values() else None,
        datetime_start=time_of(trial["created_at"]),
        datetime_complete=time_of(trial["ended_at"]) if ended else None,
        params={name: category(value) for name, value in trial["params"].items()},
        distributions=dict(distributions),
        user_attrs={key: trial[key] for key in KEPT},
        system_attrs={},
        intermediate_values={step: value for step, value in reached.items() if state != TrialState.PRUNED or step <= last},
    )


def time_of(milliseconds: int) -> datetime:
    """As Optuna has times: this machine's, without a zone."""
    return datetime.fromtimestamp(milliseconds / 1000)


def category(value: Any) -> Any:
    """A hyperparameter in Optuna's words, which has none for a list: that is JSON."""
    return json.dumps(value) if isinstance(value, list) else value


def distribution(dimension: Mapping[str, Any]) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if dimension["type"] == "choice":
        return CategoricalDistribution([category(value) for value in dimension["values"]])
    return FloatDistribution(dimension["min"], dimension["max"], log=dimension["type"] == "log_uniform")
