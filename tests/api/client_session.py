"""A data scientist's script, for any release of MLflow's client.

`python tests/api/client_session.py http://127.0.0.1:8057` against any server; it needs nothing of this repository, and
works with mlflow-skinny 2.9 and newer. `test_client_versions` runs it, with another interpreter where one is named.
"""

import math
import os
import sys
import tempfile
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException


def tracking(client: MlflowClient) -> str:
    experiment = mlflow.set_experiment(f"session {os.getpid()}")
    with mlflow.start_run(run_name="parent", tags={"team": "a"}) as parent, tempfile.TemporaryDirectory() as folder:
        mlflow.log_params({"lr": 2e-5, "model": "zen"})
        mlflow.log_metric("loss", 0.5, step=0)
        mlflow.log_metrics({"loss": 0.4, "broken": math.nan}, step=1)
        file = Path(folder, "weights.bin")
        file.write_bytes(bytes(range(256)) * 100)
        mlflow.log_artifact(str(file), "model")
        mlflow.log_dict({"a": 1}, "config.json")
        with mlflow.start_run(run_name="child", nested=True):
            mlflow.set_tag("is", "nested")
    run = client.get_run(parent.info.run_id)
    assert run.data.params == {"lr": "2e-05", "model": "zen"}, run.data.params
    assert run.data.metrics["loss"] == 0.4 and math.isnan(run.data.metrics["broken"])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")] == [
        (0, 0.5),
        (1, 0.4),
    ]
    assert client.get_metric_history(run.info.run_id, "absent") == []
    client.log_batch(run.info.run_id, [Metric("m", 1.0, 5, 0)], [Param("p", "x")], [RunTag("t", "y")])
    assert sorted(entry.path for entry in client.list_artifacts(run.info.run_id)) == ["config.json", "model"]
    found = mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/model/weights.bin")
    assert Path(found).read_bytes() == bytes(range(256)) * 100
    [hit] = client.search_runs([experiment.experiment_id], "tags.team = 'a' and metrics.loss < 0.45")
    assert hit.info.run_id == run.info.run_id
    children = client.search_runs([experiment.experiment_id], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert [child.data.tags["is"] for child in children] == ["nested"]
    try:
        client.log_param(run.info.run_id, "p", "changed")
    except MlflowException as refused:
        assert refused.error_code == "INVALID_PARAMETER_VALUE", refused
    else:
        raise AssertionError("a param was changed")
    client.delete_run(run.info.run_id)
    client.restore_run(run.info.run_id)
    return str(run.info.run_id)


def registry(client: MlflowClient, run_id: str) -> None:
    name = f"model-{os.getpid()}"
    client.create_registered_model(name, tags={"a": "1"}, description="d")
    version = client.create_model_version(name, f"{client.get_run(run_id).info.artifact_uri}/model", run_id)
    client.set_registered_model_alias(name, "champion", version.version)
    client.set_model_version_tag(name, version.version, "checked", "yes")
    assert client.get_model_version_by_alias(name, "champion").tags == {"checked": "yes"}
    assert [found.version for found in client.search_model_versions(f"name = '{name}'")] == [version.version]
    assert [found.name for found in client.search_registered_models(f"name = '{name}'")] == [name]
    found = Path(mlflow.artifacts.download_artifacts(f"models:/{name}@champion"))
    assert [file.name for file in found.iterdir() if file.suffix == ".bin"] == ["weights.bin"]
    client.delete_model_version(name, version.version)
    client.delete_registered_model(name)


if __name__ == "__main__":
    mlflow.set_tracking_uri(sys.argv[1])
    its_client = MlflowClient()
    registry(its_client, tracking(its_client))
    print(f"mlflow {mlflow.__version__} did everything")
