"""Kubernetes backend: jobs as rows that the controller turns into gangs of pods.

It uses only the database and the object store. Only the controller calls the API server: supervisors need no permissions
there, do not load its client, and keep working while it is unavailable.
"""

from collections.abc import Sequence

from recipes.contracts.job import Job, Result
from recipes.storage.artifact_store import Store
from resources.compute.base import Compute, JobKey, Observation, Phase, read_result
from resources.compute.credentials import Credentials
from resources.compute.kubernetes.gang import base_name, plan_gang
from resources.compute.kubernetes.job_logs import JobLogs
from resources.compute.kubernetes.namespaces import organization_namespace
from resources.metadata.cluster_jobs import ClusterJobs
from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.ownership import job_organization
from resources.settings.scheduler import Scheduler
from resources.settings.settings import Settings

POLL_SECONDS = 2.0
"""Launchers upload their logs every 5 s."""


class KubernetesCompute(Compute):
    """Run each job as a gang of pods.

    Args:
        store: object store with the control plane's own keys; a job's document contains none.
    """

    queues_jobs = True

    def __init__(self, database: Database, store: Store, scheduler: Scheduler, poll_seconds: float = POLL_SECONDS) -> None:
        # The controller issues, renews and revokes tokens: they must outlive supervisors, because pods need them to save
        # a checkpoint after a cancellation.
        super().__init__(poll_seconds)
        self._database = database
        self._jobs = ClusterJobs(database)
        self._store = store
        self._logs = JobLogs(store)
        self._scheduler = scheduler

    def submit(self, job: Job) -> None:
        """Submit the job, or attach to it.

        Raises:
            BadConfiguration: the job requests hardware that is not in the settings.
        """
        plan_gang(job, self._scheduler)
        namespace = self._find_namespace(job)
        row = self._jobs.submit(job, namespace, base_name(job))
        if row.phase is Phase.SUCCEEDED and self.result(job) is None:  # its result was deleted since
            self._jobs.acknowledge_end(job)
            self._jobs.submit(job, namespace, base_name(job))

    def observe(self, job: JobKey) -> Observation:
        """Return the state of a job.

        Raises:
            FileNotFoundError: the job was never submitted.
        """
        return self._jobs.get(job).observation

    def observe_submitted(self, jobs: Sequence[JobKey]) -> list[Observation | None]:
        """Return the state of each job, with one query for all."""
        rows = {(row.job_id, row.program): row for row in self._jobs.list_wanted({job.id for job in jobs})}
        return [row.observation if (row := rows.get((job.id, job.program))) else None for job in jobs]

    def cancel(self, job: JobKey) -> None:
        """Request cancellation; the controller ends the job within its grace period."""
        self._jobs.want_cancel(job)

    def acknowledge_end(self, job: JobKey) -> None:
        self._jobs.acknowledge_end(job)

    def list_unfinished(self) -> Sequence[JobKey]:
        return self._jobs.active()

    def read_log(self, job: JobKey, offset: int, max_bytes: int | None = None) -> bytes:
        return self._logs.read(job, self._count_attempts(job), offset, max_bytes)

    def log_size(self, job: JobKey) -> int:
        return self._logs.size(job, self._count_attempts(job))

    def has_processes(self, job: JobKey) -> bool:
        """Return whether the job has not ended.

        A queued or suspended job counts: it will run without a supervisor.
        """
        row = self._jobs.find(job)
        return row is not None and not row.has_ended

    def terminate_processes(self, job: JobKey) -> None:
        """Request cancellation; the cluster kills pods that outlive their grace period."""
        self._jobs.want_cancel(job)

    def queued_until(self, job: JobKey) -> int:
        row = self._jobs.find(job)
        if row is None:
            return 0
        return now_ms() if row.phase in (Phase.PENDING, Phase.SUSPENDED) else row.admitted_at or 0

    def result(self, job: Job) -> Result | None:
        return read_result(self._store, job)

    def _find_namespace(self, job: Job) -> str:
        if not self._scheduler.namespace_per_organization:
            return self._scheduler.namespace
        return organization_namespace(self._scheduler, job_organization(self._database, job))

    def _count_attempts(self, job: JobKey) -> int:
        row = self._jobs.find(job)
        return row.attempt if row else 0


def open_backend(settings: Settings, credentials: Credentials) -> KubernetesCompute:
    """Open the backend of the cluster whose controller uses the same database."""
    database = Database(settings.database_url, settings.database.connect_seconds)
    return KubernetesCompute(database, Store(settings.store, settings.storage.variables), settings.scheduler)
