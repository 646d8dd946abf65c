"""`hanzo-ml hpo export`: how Optuna itself reads a sweep."""

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from recipes.storage.artifact_store import Store
from resources.hpo.sweep_advance import advance_sweep
from resources.hpo.sweeps import Sweeps
from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.jobs import Jobs
from resources.metadata.tracking.run_data import RunData
from tests.resources.hpo.sweep_files import sweep
from tests.support.cli.command_line import refusal, run
from tests.support.server_process import ServerProcess

SPACE = {
    "learning_rate": {"type": "log_uniform", "min": 1e-5, "max": 1e-1},
    "weight_decay": {"type": "uniform", "min": 0.0, "max": 0.1},
    "optimizer": {"type": "choice", "values": ["adamw", "paged_adamw"]},
    "gradient_checkpointing": {"type": "choice", "values": [True, False]},
    "lora_target_modules": {"type": "choice", "values": [["q_proj"], ["q_proj", "v_proj"]]},
    "system_prompt": {"type": "choice", "values": [None, "Be kind."]},
}
EVALUATED: tuple[dict[int, float], ...] = (
    {10: 0.9, 40: 0.5},
    {10: 0.8, 40: 0.3},
    {10: 0.7, 20: 0.8, 30: 0.9, 35: 0.1},
    {10: math.nan},
    {10: math.inf},
)


class Search:
    """A sweep of five trials: two completed, one pruned, one failed, one running."""

    def __init__(self, server: ServerProcess, **changes: Any) -> None:
        self._server, self.database = server, Database(server.settings.database_url)
        config = sweep(search_space=SPACE, max_concurrent_trials=5, early_stopping={"patience": 2}, **changes)
        self.sweeps = Sweeps(self.database)
        self.id = self.sweeps.start(config, user="ann", organization="default").id
        self.look()
        for trial, values in zip(self.sweeps.snapshot(self.id).trials, EVALUATED, strict=True):
            points = [metric_point("eval/loss", value, step, step) for step, value in values.items()]
            Jobs(self.database).start(trial.job_id)
            RunData(self.database).log_batch(trial.job_id, metrics=points)
            if trial.number < 2:
                with self.database.write() as connection:
                    Jobs(self.database).complete(connection, trial.job_id, {}, 1.0)
            if trial.number == 3:
                Jobs(self.database).fail(trial.job_id, "the disk is full")
        self.look(2)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            advance_sweep(self.database, Store(self._server.settings.store), self.id, lambda job: True)


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_exported_sweep_is_a_native_optuna_study(server: ServerProcess, tmp_path: Path, direction: str) -> None:
    search = Search(server, max_trials=5, objective={"metric": "eval/loss", "direction": direction})
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    for _ in range(2):  # the second replaces the first
        done = run(server.url, "hpo", "export", search.id, "--to", storage)
        assert (done.returncode, done.stdout) == (0, f"study doors-hpo-{search.id}: 5 trials\n"), done.stderr
    study = optuna.load_study(study_name=None, storage=storage)
    trials = search.sweeps.snapshot(search.id).trials
    assert study.direction.name.lower() == direction and study.metric_names == ["eval/loss"]
    smaller = direction == "minimize"
    stalled = TrialState.PRUNED if smaller else TrialState.RUNNING  # it became larger
    states = [TrialState.COMPLETE, TrialState.COMPLETE, stalled, TrialState.FAIL, TrialState.RUNNING]
    assert [trial.state for trial in study.trials] == states
    lists = [{**trial.params, "lora_target_modules": json.dumps(trial.params["lora_target_modules"])} for trial in trials]
    assert [trial.params for trial in study.trials] == lists
    assert [trial.user_attrs["run_id"] for trial in study.trials] == [trial.job_id for trial in trials]
    assert study.trials[3].user_attrs["reason"] == "the disk is full"
    for trial, values in zip(study.trials, EVALUATED, strict=True):
        last = 30 if trial.state == TrialState.PRUNED else 40  # values logged before its processes were lost are left out
        until = {step: value for step, value in values.items() if step <= last}
        assert trial.intermediate_values == pytest.approx(until, nan_ok=True)
    started = [int(trial.datetime_start.timestamp() * 1000) for trial in study.trials if trial.datetime_start]
    assert started == [trial.created_at for trial in trials]
    assert study.best_trial.number == (1 if smaller else 0) and study.best_value == (0.3 if smaller else 0.5)
    assert optuna.importance.get_param_importances(study).keys() == SPACE.keys()
    assert study.ask({key: study.trials[0].distributions[key] for key in SPACE}).number == 5, "it can be gone on with"


def test_unwritable_export_target_is_refused_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    search = Search(server, max_trials=5)
    for to in ("nothing://here", f"sqlite:///{tmp_path}/there/is/none.db"):
        assert "cannot write to the database of --to" in refusal(run(server.url, "hpo", "export", search.id, "--to", to))
