"""Run workers as pods: dagster-k8s's launcher with a health check that tolerates outages.

A run worker supervises a job that runs in its own pods, and supervisors may attach to it one after another. So a worker is
replaced as soon as it is certainly gone, but never because the API server does not respond.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster_k8s.client import DagsterK8sAPIRetryLimitExceeded, DagsterK8sUnrecoverableAPIError
from dagster_k8s.job import get_job_name_from_run_id
from dagster_k8s.launcher import K8sRunLauncher
from kubernetes.client import ApiException, V1DeleteOptions, V1Job, V1Pod  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from resources.orchestration.run_worker_health import WorkerHealth, has_ended, has_living_pods, worker_health
from resources.orchestration.run_workers import RecoverableWorkers

SNAPSHOT_SECONDS = 5.0
"""How long one listing of all workers serves health checks of many runs."""
REQUEST_SECONDS = 10
"""Timeout of a request: one check must not delay those of other runs."""
NOT_FOUND, CONFLICT = 404, 409
RUN_LABEL, JOB_LABEL = "dagster/run-id", "batch.kubernetes.io/job-name"


@dataclass(frozen=True)
class Workers:
    """Jobs and pods of all run workers by Job name, from one listing."""

    jobs: Mapping[str, V1Job]
    pods: Mapping[str, Sequence[V1Pod]]
    at: float = field(default_factory=time.monotonic)

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.at < SNAPSHOT_SECONDS


class KubernetesRunLauncher(K8sRunLauncher, RecoverableWorkers):  # type: ignore[misc]
    """Launches each run as a Kubernetes Job of one pod that is never restarted.

    Configured like dagster-k8s; `labels` must be unique to the workers of this installation.
    """

    _listed: Workers | None = None

    def launch_run(self, context: LaunchRunContext) -> None:
        """Create the worker's Job; during an API server outage `recover_start` does so later."""
        try:
            with unwrapped_errors():
                super().launch_run(context)
        except (ApiException, HTTPError) as error:
            if is_conflict(error):  # created by an earlier request or by another daemon
                return
            if not is_outage(error):
                raise
            message = f"The Kubernetes API server does not respond, the run worker starts later: {summarize(error)}"
            self._instance.report_engine_event(message, context.dagster_run, cls=type(self))

    def _launch_k8s_job_with_args(self, job_name: str, args: Sequence[str] | None, run: dg.DagsterRun) -> None:
        # The image's entry point is the `hanzo-ml` command, and its interpreter has another path than the code server's.
        arguments = list(args or ())
        command = ["python", "-m", "dagster", *arguments[arguments.index("api") :]]
        super()._launch_k8s_job_with_args(job_name, command, run)

    def terminate(self, run_id: str) -> bool:
        """Delete the worker's Job: its process cancels the supervised job and reports the end.

        A worker that has not started cannot report, and has nothing to cancel.
        """
        run = self._instance.get_run_by_id(run_id)
        delete_worker: Callable[[str], object] = super().terminate
        terminated = bool(delete_worker(run_id))
        if terminated and run is not None and run.status == dg.DagsterRunStatus.STARTING:
            current = self._instance.get_run_by_id(run_id)
            if current is not None and not current.is_finished:
                self._instance.report_run_canceled(current)
        return terminated

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Return the health of a started worker; Dagster fails its run unless RUNNING or SUCCESS.

        Leftovers of a lost worker are removed first: nothing may run on after its run has failed.
        """
        try:
            health = self._health(run)
            if health.has_leftovers:
                self.remove_worker(run.run_id)
        except (ApiException, HTTPError) as error:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"unknown: {summarize(error)}")
        if health.alive:
            return CheckRunHealthResult(WorkerStatus.RUNNING, health.detail or None)
        return CheckRunHealthResult(WorkerStatus.FAILED, health.detail)

    def recover_start(self, run: dg.DagsterRun) -> None:
        """Relaunch a starting run without Job; fail one whose worker ended before it started."""
        try:
            health = self._health(run)
            if health.alive:
                return
            if self._read_job(self._job_name(run.run_id)) is None:
                self.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
                return
            if health.has_leftovers:
                self.remove_worker(run.run_id)
        except (ApiException, HTTPError):
            return  # the next call tries again
        current = self._instance.get_run_by_id(run.run_id)
        if current is not None and current.status == dg.DagsterRunStatus.STARTING:
            self._instance.report_run_failed(current, f"Its run worker ended before it started: {health.detail}")

    def remove_leftovers(self, is_over: Callable[[str], bool]) -> list[str]:
        """Remove workers whose run is over according to `is_over`. Returns their run ids."""
        if not self.labels:  # workers of other installations would not be distinguishable
            return []
        try:
            workers = self._list_workers()
            leftovers = [
                run_id
                for name, job in workers.jobs.items()
                if (not has_ended(job) or has_living_pods(workers.pods.get(name, ())))
                and (run_id := self._find_run_id(job))
                and is_over(run_id)
            ]
            for run_id in leftovers:
                self.remove_worker(run_id)
        except (ApiException, HTTPError):
            return []
        return leftovers

    def remove_worker(self, run_id: str) -> None:
        """Delete a run's Job and pods, forcing overdue ones: a dead kubelet never confirms."""
        name = self._job_name(run_id)
        with suppressed_not_found():
            self._api_client.batch_api.delete_namespaced_job(
                name, self.job_namespace, propagation_policy="Background", _request_timeout=REQUEST_SECONDS
            )
        for pod in self._list_pods(f"{JOB_LABEL}={name}"):
            overdue = pod.metadata.deletion_timestamp is not None
            with suppressed_not_found():
                self._api_client.core_api.delete_namespaced_pod(
                    pod.metadata.name,
                    self.job_namespace,
                    body=V1DeleteOptions(grace_period_seconds=0) if overdue else None,
                    _request_timeout=REQUEST_SECONDS,
                )

    def _health(self, run: dg.DagsterRun) -> WorkerHealth:
        name, now = self._job_name(run.run_id), datetime.now(UTC)
        if self._listed is None or not self._listed.is_fresh:
            self._listed = self._list_workers()
        health = worker_health(self._listed.jobs.get(name), self._listed.pods.get(name, ()), now)
        if health.alive:
            return health
        # The listing may be older than the run: only a fresh read may count against it.
        return worker_health(self._read_job(name), self._list_pods(f"{JOB_LABEL}={name}"), now)

    def _list_workers(self) -> Workers:
        jobs = self._api_client.batch_api.list_namespaced_job(
            self.job_namespace, label_selector=self._worker_selector, _request_timeout=REQUEST_SECONDS
        ).items
        pods: dict[str, list[V1Pod]] = defaultdict(list)
        for pod in self._list_pods(self._worker_selector):
            pods[pod.metadata.labels.get(JOB_LABEL, "")].append(pod)
        return Workers({job.metadata.name: job for job in jobs}, pods)

    def _list_pods(self, selector: str) -> list[V1Pod]:
        listing = self._api_client.core_api.list_namespaced_pod(
            self.job_namespace, label_selector=selector, _request_timeout=REQUEST_SECONDS
        )
        return list(listing.items)

    def _read_job(self, name: str) -> V1Job | None:
        with suppressed_not_found():
            return self._api_client.batch_api.read_namespaced_job(name, self.job_namespace, _request_timeout=REQUEST_SECONDS)
        return None

    @property
    def _worker_selector(self) -> str:
        """Return the label selector of this installation's workers: unknown runs may be another's."""
        return ",".join(f"{key}={value}" for key, value in self.labels.items())

    def _find_run_id(self, job: V1Job) -> str | None:
        """Return the run of a worker's Job; None for Jobs of other launchers."""
        run_id = (job.metadata.labels or {}).get(RUN_LABEL)
        return run_id if run_id and self._job_name(run_id) == job.metadata.name else None

    def _job_name(self, run_id: str) -> str:
        return str(get_job_name_from_run_id(run_id))


@contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Unwrap the API server's errors from those of dagster-k8s."""
    try:
        yield
    except (DagsterK8sUnrecoverableAPIError, DagsterK8sAPIRetryLimitExceeded) as error:
        raise error.k8s_api_exception or error from None


@contextmanager
def suppressed_not_found() -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        if error.status != NOT_FOUND:
            raise


def is_conflict(error: Exception) -> bool:
    return isinstance(error, ApiException) and error.status == CONFLICT


def is_outage(error: Exception) -> bool:
    """Whether the API server failed or was unreachable, rather than rejecting the request."""
    return not isinstance(error, ApiException) or not error.status or error.status == 429 or error.status >= 500


def summarize(error: Any) -> str:
    if isinstance(error, ApiException) and error.status:
        return f"{error.status} {error.reason}"
    return " ".join(str(error).split())[:300]
