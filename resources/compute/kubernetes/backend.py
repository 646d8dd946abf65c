"""Kubernetes backend: jobs as rows that the controller turns into gangs of pods.

It talks to the database and the object store alone. Only the controller calls the API server: supervisors need no
permission there, do not load its client, and go on while it is away.
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
    """Runs each job as a gang of pods.

    Args:
        store: with the control plane's own keys; a job's document holds none.
    """

    queues_jobs = True

    def __init__(self, database: Database, store: Store, scheduler: Scheduler, poll_seconds: float = POLL_SECONDS) -> None:
        # The controller issues, renews and revokes tokens: they outlive supervisors, and pods still need them to save a
        # checkpoint after a cancellation.
        super().__init__(poll_seconds)
        self._database = database
        self._jobs = ClusterJobs(database)
        self._store = store
        self._logs = JobLogs(store)
        self._scheduler = scheduler

    def submit(self, job: Job) -> None:
        """Raises BadConfiguration: the job asks for hardware that the settings do not know."""
        plan_gang(job, self._scheduler)
        namespace = self._find_namespace(job)
        row = self._jobs.submit(job, namespace, base_name(job))
        if row.phase is Phase.SUCCEEDED and self.result(job) is None:  # what it made was deleted since
            self._jobs.acknowledge_end(job)
            self._jobs.submit(job, namespace, base_name(job))

    def observe(self, job: JobKey) -> Observation:
        """Raises FileNotFoundError: the job was never submitted."""
        return self._jobs.get(job).observation

    def observe_submitted(self, jobs: Sequence[JobKey]) -> list[Observation | None]:
        """One query for all."""
        rows = {(row.job_id, row.program): row for row in self._jobs.list_wanted({job.id for job in jobs})}
        return [row.observation if (row := rows.get((job.id, job.program))) else None for job in jobs]

    def cancel(self, job: JobKey) -> None:
        """Returns at once: the controller ends the job within its grace period."""
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
        """Whether the job has not ended: one that is queued or suspended will run without anybody's help."""
        row = self._jobs.find(job)
        return row is not None and not row.has_ended

    def terminate_processes(self, job: JobKey) -> None:
        """The cluster kills what outlives its grace period by itself."""
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
    """The backend of the cluster whose controller uses the same database."""
    database = Database(settings.database_url, settings.database.connect_seconds)
    return KubernetesCompute(database, Store(settings.store, settings.storage.variables), settings.scheduler)
