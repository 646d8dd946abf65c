"""Log from a training script: `import hanzo_ml`, then as with mlflow.

    hanzo_ml.set_tracking_uri("http://ml.hanzo.svc:8057")
    hanzo_ml.set_experiment("zen-72b-finance")
    with hanzo_ml.start_run(run_name="qlora") as run:
        run.log_params({"lora_rank": 64})
        run.log_metrics({"train/loss": 0.42}, step=100)

Importing this imports neither mlflow nor httpx. Programs that need the metric buffer alone take `hanzo_ml.client.buffer`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hanzo_ml.client.client import Client

if TYPE_CHECKING:
    from hanzo_ml.client.run import Run

__all__ = [
    "active_run",
    "end_run",
    "log_artifact",
    "log_metric",
    "log_metrics",
    "log_param",
    "log_params",
    "set_experiment",
    "set_tag",
    "set_tags",
    "set_tracking_uri",
    "start_run",
]


@cache
def default_client() -> Client:
    """The client behind this module's functions, made from HANZO_ML_TRACKING_URI and HANZO_ML_EXPERIMENT at first use."""
    return Client()


def set_tracking_uri(uri: str) -> None:
    default_client().set_tracking_uri(uri)


def set_experiment(name: str) -> None:
    default_client().set_experiment(name)


def start_run(run_name: str | None = None, run_id: str | None = None, tags: Mapping[str, Any] | None = None) -> "Run":
    return default_client().start_run(run_name, run_id, tags)


def active_run() -> "Run | None":
    return default_client().active_run()


def end_run(status: str = "FINISHED") -> None:
    default_client().end_run(status)


def log_param(key: str, value: Any) -> None:
    default_client().current_run().log_param(key, value)


def log_params(params: Mapping[str, Any]) -> None:
    default_client().current_run().log_params(params)


def log_metric(key: str, value: float, step: int | None = None) -> None:
    default_client().current_run().log_metric(key, value, step)


def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> None:
    default_client().current_run().log_metrics(metrics, step)


def set_tag(key: str, value: Any) -> None:
    default_client().current_run().set_tag(key, value)


def set_tags(tags: Mapping[str, Any]) -> None:
    default_client().current_run().set_tags(tags)


def log_artifact(local_path: str | Path, artifact_path: str | None = None) -> None:
    """mlflow's order of arguments: the file keeps its name, in the folder `artifact_path`."""
    name = Path(local_path).name
    default_client().current_run().log_artifact(f"{artifact_path}/{name}" if artifact_path else name, local_path)
