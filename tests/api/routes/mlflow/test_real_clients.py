"""Common training libraries, unmodified, against the real server: only MLFLOW_TRACKING_URI differs.

One server process for the module; everything that is trained here is tiny.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import optuna
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger
from mlflow import MlflowClient
from mlflow.entities import Experiment, Run
from mlflow.tracking import fluent
from optuna_integration.mlflow import MLflowCallback  # type: ignore[import-untyped]
from sklearn.linear_model import LinearRegression  # type: ignore[import-untyped]
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from tests.recipes.tiny_model import make_tiny_model
from tests.support.server_process import ServerProcess

INPUTS = np.arange(8.0).reshape(4, 2)


@pytest.fixture(autouse=True)
def client(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    """Set what a user changes, and restore mlflow's own state in this process afterwards."""
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.setenv(name, "")  # so that what a test sets is removed after it
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    yield MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    monkeypatch.setattr(fluent, "_active_experiment_id", None)


def experiment(client: MlflowClient, name: str) -> Experiment:
    found = client.get_experiment_by_name(name)
    assert found is not None
    return found


def only_run(client: MlflowClient, experiment_name: str) -> Run:
    [run] = client.search_runs([experiment(client, experiment_name).experiment_id])
    return run


@pytest.mark.requirement("F3")
def test_fluent_script_logs_nested_runs_and_files(client: MlflowClient, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("a")
    (tmp_path / "one.txt").write_text("one")
    mlflow.set_experiment("fluent")
    with mlflow.start_run(run_name="parent") as parent:
        mlflow.log_params({"learning_rate": 2e-5, "model": "zen-7b"})
        for step in range(3):
            mlflow.log_metrics({"loss": 1 / (step + 1), "accuracy": step / 10}, step=step)
        mlflow.set_tags({"team": "finance"})
        mlflow.log_artifact(str(tmp_path / "one.txt"))
        mlflow.log_artifacts(str(tmp_path / "files"), "folder")
        mlflow.log_dict({"k": 1}, "deep/er/config.json")
        mlflow.log_text("hello", "notes.txt")
        with mlflow.start_run(nested=True, run_name="child"):
            mlflow.log_metric("loss", 0.1)
    runs = mlflow.search_runs(output_format="list", order_by=["metrics.loss ASC"])
    assert [run.info.run_name for run in runs] == ["child", "parent"]
    assert runs[0].data.tags["mlflow.parentRunId"] == parent.info.run_id
    stored = mlflow.get_run(parent.info.run_id)
    assert (stored.info.status, stored.data.metrics) == ("FINISHED", {"loss": 1 / 3, "accuracy": 0.2})
    assert stored.data.params == {"learning_rate": "2e-05", "model": "zen-7b"}
    assert stored.data.tags["team"] == "finance"
    assert [point.step for point in client.get_metric_history(parent.info.run_id, "loss")] == [0, 1, 2]
    for everything in (
        {"run_id": parent.info.run_id, "artifact_path": "."},
        {"artifact_uri": f"runs:/{parent.info.run_id}/"},
    ):
        folder = Path(mlflow.artifacts.download_artifacts(**everything))
        files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        assert files == {"one.txt", "folder/a.txt", "deep/er/config.json", "notes.txt"}
    assert mlflow.artifacts.load_dict(f"runs:/{parent.info.run_id}/deep/er/config.json") == {"k": 1}


def test_datasets_read_by_a_run_are_recorded_and_searchable(client: MlflowClient) -> None:
    mlflow.set_experiment("datasets")
    table = mlflow.data.from_pandas(pd.DataFrame({"a": [1, 2]}), name="table")
    with mlflow.start_run() as run:
        mlflow.log_input(table, context="train", tags={"split": "first"})
        mlflow.log_input(mlflow.data.from_numpy(INPUTS, name="numbers"), context="eval")
    stored = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
    assert [used.dataset.name for used in stored] == ["table", "numbers"]
    assert json.loads(stored[0].dataset.profile) == {"num_rows": 2, "num_elements": 2}
    assert {tag.key: tag.value for tag in stored[0].tags} == {"split": "first", "mlflow.data.context": "train"}
    for condition, count in (
        ("name = 'table'", 1),
        ("context LIKE 'ev%'", 1),
        (f"digest = '{table.digest}'", 1),
        ("name = 'x'", 0),
    ):
        assert len(mlflow.search_runs(filter_string=f"datasets.{condition}", output_format="list")) == count


@pytest.mark.slow
def test_scikit_learn_model_is_logged_and_searched(client: MlflowClient) -> None:
    mlflow.set_experiment("scikit-learn")
    model = LinearRegression().fit(INPUTS, INPUTS.sum(axis=1))
    evaluated = mlflow.data.from_numpy(INPUTS, name="numbers")
    with mlflow.start_run() as run:
        mlflow.log_params({"fit_intercept": True})
        logged = mlflow.sklearn.log_model(
            model, name="model", input_example=INPUTS[:1], pip_requirements=["scikit-learn"], params={"alpha": "1"}
        )
        mlflow.log_metric("accuracy", 0.9, model_id=logged.model_id, dataset=evaluated)
    for uri in (f"runs:/{run.info.run_id}/model", f"models:/{logged.model_id}"):
        assert mlflow.pyfunc.load_model(uri).predict(INPUTS).tolist() == pytest.approx([1, 5, 9, 13])
    [output] = mlflow.get_run(run.info.run_id).outputs.model_outputs
    assert output.model_id == logged.model_id
    stored = mlflow.get_logged_model(logged.model_id)
    assert (str(stored.status), stored.params["alpha"], stored.source_run_id) == ("READY", "1", run.info.run_id)
    assert [(metric.key, metric.value, metric.dataset_name) for metric in stored.metrics] == [("accuracy", 0.9, "numbers")]
    [found] = mlflow.search_logged_models(
        filter_string="metrics.accuracy > 0.5 AND status = 'READY'",
        datasets=[{"dataset_name": "numbers", "dataset_digest": evaluated.digest}],
        order_by=[{"field_name": "metrics.accuracy", "ascending": False, "dataset_name": "numbers"}],
        output_format="list",
    )
    assert found.model_id == logged.model_id
    mlflow.set_logged_model_tags(logged.model_id, {"stage": "candidate"})
    mlflow.delete_logged_model_tag(logged.model_id, "stage")
    client.delete_logged_model(logged.model_id)
    assert mlflow.search_logged_models(output_format="list") == []


def test_external_model_without_a_run_is_recorded(client: MlflowClient) -> None:
    mlflow.set_experiment("without a run")
    external = mlflow.create_external_model(name="elsewhere", params={"a": "b"}, tags={"where": "elsewhere"})
    assert mlflow.last_logged_model().model_id == external.model_id
    found = mlflow.search_logged_models(filter_string="tags.where IN ('elsewhere') AND params.a = 'b'", output_format="list")
    assert [model.name for model in found] == ["elsewhere"]


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 8)
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.requirement("F4")
def test_transformers_trainer_logs_its_run(client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "transformers")
    model = LlamaForCausalLM.from_pretrained(make_tiny_model(tmp_path / "model"), dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "output"),
        run_name="two steps",
        report_to=["mlflow"],
        max_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
    mlflow.end_run()
    run = only_run(client, "transformers")
    assert (run.info.run_name, run.info.status) == ("two steps", "FINISHED")
    assert run.data.params["max_steps"] == "2"
    assert len(run.data.params) > 100
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == [1, 2]
    assert "train_runtime" in run.data.metrics


@pytest.mark.requirement("F4")
def test_lightning_logger_logs_its_run_and_checkpoints(client: MlflowClient, tmp_path: Path) -> None:
    logger = MLFlowLogger(experiment_name="lightning", tracking_uri=client.tracking_uri, log_model=True, tags={"a": "b"})
    logger.log_hyperparams({"lr": 0.1, "layers": {"hidden": 2}})

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step: Any = super().training_step(batch, batch_idx)
            self.log("loss", step["loss"])
            return step

    trainer = LightningTrainer(
        default_root_dir=str(tmp_path),
        max_steps=2,
        log_every_n_steps=1,
        limit_val_batches=0,
        logger=logger,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    run = only_run(client, "lightning")
    assert (run.info.run_id, run.info.status) == (logger.run_id, "FINISHED")
    assert (run.data.params, run.data.tags["a"]) == ({"lr": "0.1", "layers/hidden": "2"}, "b")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == [0, 1]
    [checkpoint] = client.list_artifacts(run.info.run_id)
    files = [Path(file.path).name for file in client.list_artifacts(run.info.run_id, checkpoint.path)]
    assert sorted(files) == ["aliases.txt", f"{checkpoint.path}.ckpt", "metadata.yaml"]


def test_optuna_callback_logs_a_run_for_each_trial(client: MlflowClient) -> None:
    callback = MLflowCallback(tracking_uri=client.tracking_uri, metric_name="distance", mlflow_kwargs={"nested": True})
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name="optuna", sampler=optuna.samplers.RandomSampler(seed=1))
    study.optimize(lambda trial: abs(trial.suggest_float("x", -1, 1)), n_trials=3, callbacks=[callback])
    runs = client.search_runs([experiment(client, "optuna").experiment_id], order_by=["metrics.distance ASC"])
    assert [run.data.metrics["distance"] for run in runs] == sorted(trial.value or 0.0 for trial in study.trials)
    assert float(runs[0].data.params["x"]) == study.best_params["x"]
    assert runs[0].data.tags["direction"] == "MINIMIZE"
