"""Start and resume tracked runs on the tracking server."""

import atexit
import logging
import os
import sys
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from hanzo_ml.client.run import Run

log = logging.getLogger(__name__)

DEFAULT_TRACKING_URI = "http://127.0.0.1:8057"
DEFAULT_EXPERIMENT = "Default"


class Client:
    """A thin layer over mlflow's client.

    It imports mlflow only when a run starts, because that takes seconds.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.tracking_uri = environ.get("HANZO_ML_TRACKING_URI", DEFAULT_TRACKING_URI)
        self.experiment = environ.get("HANZO_ML_EXPERIMENT", DEFAULT_EXPERIMENT)
        self._job_run_id = environ.get("HANZO_ML_RUN_ID")
        self._active: list[Run] = []

    def set_tracking_uri(self, uri: str) -> None:
        """Log the runs that start after this to `uri`."""
        self.tracking_uri = uri

    def set_experiment(self, name: str) -> None:
        """Assign the runs that start after this to an experiment.

        It is created if it does not exist.
        """
        self.experiment = name

    def start_run(
        self, run_name: str | None = None, run_id: str | None = None, tags: Mapping[str, Any] | None = None
    ) -> "Run":
        """Start a new run, or resume the run `run_id`. Use it in a `with` statement.

        A new run gets mlflow's context tags: the git commit of the script, the script, the user. In a job, the first call
        without `run_id` resumes the job's run, which HANZO_ML_RUN_ID names, as mlflow does with MLFLOW_RUN_ID. If the server
        is unavailable, the call is retried for about a minute; a retry never creates a second run.

        Raises:
            hanzo_ml.client.transport.Refused: the server refuses to create the run.
        """
        from mlflow.tracking.context.registry import resolve_tags

        from hanzo_ml.client.run import Run

        mlflow = self._mlflow()
        if run_id is None:
            run_id, self._job_run_id = self._job_run_id, None
        if run_id is None:
            known = {key: str(value) for key, value in resolve_tags(dict(tags or {})).items()}
            run_id = self._new_run(self._experiment_id(mlflow), run_name, known)
        else:
            mlflow.update_run(run_id, status="RUNNING", name=run_name)
            for key, value in (tags or {}).items():
                mlflow.set_tag(run_id, key, value)
        run = Run(mlflow, self.tracking_uri, run_id, on_end=self._active.remove)
        if not self._active:
            atexit.register(self._end_at_exit)
        self._active.append(run)
        return run

    def _new_run(self, experiment_id: str, name: str | None, tags: Mapping[str, str]) -> str:
        from hanzo_ml.client.retry import retry_unavailable
        from hanzo_ml.client.transport import Transport

        transport = Transport(self.tracking_uri)
        started_at, key = time.time_ns() // 1_000_000, uuid.uuid4().hex
        try:
            return retry_unavailable(lambda: transport.create_run(experiment_id, name, started_at, tags, key))
        finally:
            transport.close()

    def active_run(self) -> "Run | None":
        return self._active[-1] if self._active else None

    def current_run(self) -> "Run":
        """Return the active run. As in mlflow, one is started if there is none."""
        return self.active_run() or self.start_run()

    def end_run(self, status: str = "FINISHED") -> None:
        if self._active:
            self._active[-1].end(status)

    def _end_at_exit(self) -> None:
        """End the run at exit; as failed if an exception ended the script.

        The interpreter stores that exception in `sys.last_value`. At an interactive prompt it is ignored, because it may be
        that of an earlier line.
        """
        failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
        self.end_run("FAILED" if failed else "FINISHED")

    def _mlflow(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)

    def _experiment_id(self, mlflow: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        found = mlflow.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(mlflow.create_experiment(self.experiment))
            except MlflowException as error:
                # Another process created it meanwhile.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = mlflow.get_experiment_by_name(self.experiment)
                assert found is not None
        return str(found.experiment_id)
