"""Run workers as processes of this machine that outlive the daemon, with death detection.

Dagster's default launcher makes a run worker a child of the code server: when that dies, the run stays "started" forever.
Here a worker holds the lock file of its run. The run monitor tests the lock and fails the run of a dead worker, and the
sensor `retry_dead_runs` retries it.
"""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import dagster as dg
from dagster._cli.api import ExecuteRunArgs
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._serdes import ConfigurableClass, ConfigurableClassData

from resources.stack.detached_process import is_running, kill_orphans, lock_folder, send_signal, start_detached


class ProcessRunLauncher(RunLauncher, ConfigurableClass):  # type: ignore[misc]
    """Launches each run as a local process. Configuration: `folder`, for locks, process ids and logs."""

    def __init__(self, folder: str, inst_data: ConfigurableClassData | None = None) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._inst_data = inst_data

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {"folder": dg.StringSource}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls(folder=config_value["folder"], inst_data=inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        assert run.job_code_origin is not None
        arguments = ExecuteRunArgs(
            job_origin=run.job_code_origin, run_id=run.run_id, instance_ref=self._instance.get_ref()
        ).get_command_args()
        work = self._folder / run.run_id
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "dagster", *arguments[list(arguments).index("api") :]]
        with lock_folder(work) as descriptor:
            if descriptor is not None:
                start_detached(command, work, descriptor, cwd=None, env={})

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        work = self._folder / run_id
        if is_running(work):
            send_signal(work, signal.SIGTERM)
        else:
            self._instance.report_run_canceled(run)
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        work = self._folder / run.run_id
        if not work.is_dir():
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, "its run worker was never started on this machine")
        if is_running(work):
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        kill_orphans(work)
        return CheckRunHealthResult(WorkerStatus.FAILED, "its run worker died")
