"""Controller against a simulated API server: from row to pods, through faults, to completion."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Distributed, Elastic, Hardware, Job, Schedule
from recipes.contracts.pod_settings import PodSettings
from resources.compute.base import Phase
from resources.compute.kubernetes.cluster import (
    CONFIG_MAP,
    JOB,
    JOB_SET,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    Cluster,
    Kind,
)
from resources.compute.kubernetes.controller import creation, priority_classes
from resources.compute.kubernetes.controller.garbage_collection import MAX_DELETIONS
from resources.compute.kubernetes.controller.reconciler import Reconciler
from resources.compute.kubernetes.gang import base_name
from resources.compute.kubernetes.namespaces import organization_namespace
from resources.compute.kubernetes.submission import delete_rest
from resources.compute.kubernetes.view import ClusterView
from resources.jobs.program_tokens import ClusterCredentials, find_program
from resources.metadata.cluster_jobs import ClusterJob, ClusterJobs
from resources.metadata.database import Database
from resources.metadata.job_attempts import Claim, JobAttempts
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import now_ms
from resources.metadata.tables import cluster_jobs
from resources.settings.scheduler import Scheduler
from tests.resources.compute.kubernetes.api_server import ApiServer, Item, serving_controller, timestamp
from tests.resources.compute.kubernetes.cluster_objects import Gang, condition, node
from tests.resources.compute.kubernetes.jobs import a_job
from tests.resources.compute.kubernetes.schemas import check
from tests.support.postgres_server import migrated_sqlite, sqlite_url

__all__ = ["migrated_sqlite", "sqlite_url"]

TRAIN = a_job(tracking=None)
TWO_NODES = a_job(tracking=None, distributed=Distributed(strategy="fsdp", num_nodes=2, gpus_per_node=1, backend="gloo"))
NAME = base_name(TRAIN)


class Killed(BaseException):
    """Signal the death of the controller's process."""


class MortalCluster(Cluster):
    """Kill the controller at request number `fatal`, before or after it is carried out."""

    def __init__(self, cluster: Cluster, fatal: int, *, carried_out: bool) -> None:
        super().__init__(cluster._api)
        self._left, self._carried_out = fatal, carried_out

    def _request(self, method: str, *arguments: Any, **named: Any) -> Item:
        self._left -= method != "GET"
        if self._left == 0 and not self._carried_out:
            raise Killed
        try:
            return super()._request(method, *arguments, **named)
        finally:
            if self._left == 0 and method != "GET":
                raise Killed


class Room:
    """Set up one cluster, one database and a replaceable controller."""

    def __init__(self, server: ApiServer, database: Database) -> None:
        self.server, self.database = server, database
        self.jobs, self.attempts = ClusterJobs(database), JobAttempts(database)
        self.scheduler = Scheduler()
        self.start_controller()
        for name in ("node-0", "node-1"):
            server.put(node(name))

    def start_controller(self, cluster: Cluster | None = None) -> None:
        cluster = cluster or self.server.cluster
        self.view = ClusterView(cluster, self.scheduler.gang_backend, lambda: None)
        self.reconciler = Reconciler(cluster, self.view, self.scheduler, self.database, ClusterCredentials(self.database))

    def submit(self, job: Job = TRAIN) -> ClusterJob:
        return self.jobs.submit(job, self.scheduler.namespace, base_name(job))

    def reconcile(self) -> ClusterJob:
        """Reconcile until nothing is left to do and return the job's row."""
        again = True
        while again:
            for mirror in self.view.mirrors:
                mirror.refresh()
            again = self.reconciler.reconcile()
        return self.row

    @property
    def row(self) -> ClusterJob:
        return self.jobs.get(TRAIN)

    def gang(self, name: str = NAME) -> Gang:
        found = self.server.find(JOB_SET, name)
        assert found is not None
        return Gang(self.server, found)

    def start(self, job: Job = TRAIN, nodes: int = 1) -> Gang:
        """Start a running gang whose attempt is claimed."""
        self.submit(job)
        self.reconcile()
        gang = self.gang()
        gang.admit()
        self.claim(gang.start(nodes), nodes)
        assert self.reconcile().phase is Phase.RUNNING
        return gang

    def claim(self, uid: str, nodes: int = 1) -> int:
        generation = self.row.generation
        claim = Claim(generation=generation, pod_uid=uid, node_rank=0, num_nodes=nodes, node="node-0")
        return self.attempts.claim(TRAIN, claim).attempt

    def set_row(self, **values: Any) -> None:
        with self.database.write() as connection:
            connection.execute(update(cluster_jobs).values(**values))

    def token(self) -> str:
        secret = self.server.find(SECRET, f"{NAME}-token")
        assert secret is not None
        return str(secret["stringData"]["token"])

    def is_valid(self, token: str) -> bool:
        with self.database.read() as connection:
            return find_program(connection, token) is not None

    def objects(self) -> list[str]:
        kinds: tuple[Kind, ...] = (CONFIG_MAP, SECRET, SERVICE, JOB_SET, JOB)
        return [f"{kind.name}/{name}" for kind in kinds for name in self.server.names(kind)]


@pytest.fixture
def room(sqlite_url: str) -> Iterator[Room]:
    database = Database(sqlite_url)
    with serving_controller() as server:
        yield Room(server, database)
    database.close()


def test_row_becomes_objects_that_the_api_server_accepts(room: Room) -> None:
    room.submit()
    room.reconcile()
    row = room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}", f"Secret/{NAME}-token", f"JobSet/{NAME}"]
    for item in room.server.items.values():
        if item["kind"] not in ("Node", "Event"):
            metadata = {key: item["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
            check({**item, "metadata": metadata})
    assert (row.phase, row.is_queued, row.detail) == (Phase.PENDING, True, "waits for Kueue to see it")


def test_pods_get_a_token_of_their_program(room: Room) -> None:
    room.submit()
    room.reconcile()
    secret = room.server.find(SECRET, f"{NAME}-token")
    assert secret is not None
    with room.database.read() as connection:
        grant = find_program(connection, secret["stringData"]["token"])
    assert grant is not None and (grant.job_id, grant.program) == (TRAIN.id, TRAIN.program)


def count_tokens(room: Room) -> int:
    with room.database.read() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM program_tokens").scalar_one())


def test_refused_secret_leaves_one_token_however_often_it_is_tried(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "RETRY_SECONDS", 0.0)
    room.submit()
    room.server.refusals["Secret"] = (403, "secrets is forbidden: exceeded quota: compute, requested: count/secrets=1")
    for _ in range(3):
        assert "exceeded quota" in room.reconcile().detail
    assert count_tokens(room) == 1
    room.server.refusals.clear()
    room.reconcile()
    secret = room.server.find(SECRET, f"{NAME}-token")
    assert secret is not None and count_tokens(room) == 1
    with room.database.read() as connection:
        assert find_program(connection, secret["stringData"]["token"]) is not None


def test_existing_secret_keeps_its_only_token(room: Room) -> None:
    room.submit()
    room.reconcile()
    room.server.remove(JOB_SET.path("hanzo-ml", NAME))
    room.start_controller()
    room.reconcile()
    assert room.server.names(JOB_SET) == [NAME] and count_tokens(room) == 1


def test_job_waits_for_the_namespace_of_its_organization_and_names_the_command(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "RETRY_SECONDS", 0.0)
    room.scheduler = Scheduler(namespace_per_organization=True)
    room.start_controller()
    Jobs(room.database).submit(name="j", config={}, user="ann", organization="Acme Inc", id=TRAIN.id)
    namespace = organization_namespace(room.scheduler, "Acme Inc")
    room.jobs.submit(TRAIN, namespace, base_name(TRAIN))
    room.server.refusal = (404, f'namespaces "{namespace}" not found')
    row = room.reconcile()
    assert row.phase is Phase.PENDING and row.detail.startswith(f"namespace {namespace} is not prepared")
    assert "`hanzo-ml tenant apply 'Acme Inc'`" in row.detail
    room.server.refusal = None
    row = room.reconcile()
    assert "tenant" not in row.detail and room.server.names(JOB_SET, namespace) == [NAME]
    assert room.server.names(CONFIG_MAP) == []


def test_gang_of_an_organization_leaves_nothing_in_its_namespace(room: Room) -> None:
    room.scheduler = Scheduler(namespace_per_organization=True)
    room.start_controller()
    room.jobs.submit(TWO_NODES, "hanzo-ml-acme", base_name(TWO_NODES))
    room.reconcile()
    assert room.server.names(NETWORK_POLICY, "hanzo-ml-acme") == [NAME]
    room.jobs.want_cancel(TWO_NODES)
    for _ in range(3):
        room.reconcile()
    left = [path for path in room.server.items if "/namespaces/hanzo-ml-acme/" in path]
    assert room.row.has_ended and left == []


def test_job_waits_where_its_organization_has_as_many_objects_as_it_may(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "RETRY_SECONDS", 0.0)
    room.server.refusals["ConfigMap"] = (403, "configmaps is forbidden: exceeded quota: hanzo-ml, used: 1001, limited: 1001")
    room.submit()
    row = room.reconcile()
    assert row.phase is Phase.PENDING and "namespace hanzo-ml is full" in row.detail and "limited: 1001" in row.detail
    room.server.refusals.clear()
    room.reconcile()
    assert room.server.names(JOB_SET) == [NAME]


def test_job_whose_pods_the_api_server_would_refuse_fails_before_anything_is_created(room: Room) -> None:
    words = 'Job.batch "x" is invalid: spec.template.spec.tolerations[0].operator: Invalid value: "Sometimes"'
    room.server.refusals["Job"] = (422, words)
    room.submit()
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.BAD_CONFIGURATION) and words in row.detail
    assert room.objects() == []


def test_job_is_created_when_its_check_is_not_permitted(room: Room) -> None:
    room.server.refusals["Job"] = (403, "jobs.batch is forbidden: cannot create resource")
    room.submit()
    room.reconcile()
    assert room.server.names(JOB_SET) == [NAME]


@pytest.mark.parametrize("carried_out", [False, True], ids=["before the request", "after the request"])
@pytest.mark.parametrize("fatal", [1, 2, 3, 4])
def test_submission_is_completed_by_the_next_controller(room: Room, fatal: int, carried_out: bool) -> None:
    room.submit()
    room.start_controller(MortalCluster(room.server.cluster, fatal, carried_out=carried_out))
    with pytest.raises(Killed):
        room.reconcile()
    room.start_controller()
    room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}", f"Secret/{NAME}-token", f"JobSet/{NAME}"]
    assert room.row.phase is Phase.PENDING


@pytest.mark.parametrize("carried_out", [False, True], ids=["before the request", "after the request"])
@pytest.mark.parametrize("fatal", [1, 2, 3, 4])
def test_clearing_is_completed_by_the_next_controller(room: Room, fatal: int, carried_out: bool) -> None:
    gang = room.start()
    gang.delete_pods()
    gang.change(condition("Completed"))
    room.start_controller(MortalCluster(room.server.cluster, fatal, carried_out=carried_out))
    with pytest.raises(Killed):
        for _ in range(3):
            room.reconcile()
    room.start_controller()
    for _ in range(3):
        room.reconcile()
    assert room.objects() == [] and room.row.phase is Phase.SUCCEEDED


def test_queued_job_reports_the_message_of_kueue_and_its_position(room: Room) -> None:
    words = (
        "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor gpu, 16 more needed"
    )
    room.submit()
    other = TRAIN.model_copy(update={"id": "f" * 32})
    room.submit(other)
    room.reconcile()
    room.gang(base_name(other)).set_workload(created="2026-01-01T00:00:00Z")
    room.gang().wait_for_quota(words)
    row = room.reconcile()
    assert (row.phase, row.detail, row.queue_position) == (Phase.PENDING, words, 2)
    assert room.jobs.get(other).queue_position == 1
    room.gang().admit()
    row = room.reconcile()
    assert (row.phase, row.queue_position, row.is_queued) == (Phase.STARTING, None, False)


def test_job_unexplained_by_kueue_reports_the_reason_of_the_first_in_its_queue(room: Room) -> None:
    """Kueue explains only one of several jobs of the same shape."""
    first = TRAIN.model_copy(update={"id": "f" * 32})
    room.submit(first)
    room.submit()
    room.reconcile()
    room.gang(base_name(first)).set_workload(
        condition("QuotaReserved", "insufficient unused quota for nvidia.com/gpu", status="False"),
        created="2026-01-01T00:00:00Z",
    )
    room.gang().set_workload()
    row = room.reconcile()
    assert row.queue_position == 2
    assert (
        row.detail == "waits in Kueue's queue, whose first job waits for this: insufficient unused quota for nvidia.com/gpu"
    )


def test_jobs_submitted_at_once_are_all_created_and_all_deleted(room: Room) -> None:
    jobs = [TRAIN.model_copy(update={"id": f"{number:032x}"}) for number in range(MAX_DELETIONS + 5)]
    for job in jobs:
        room.submit(job)
    room.submit()
    room.reconcile()
    assert len(room.server.names(JOB_SET)) == len(jobs) + 1
    for job in jobs:
        room.jobs.want_cancel(job)
    while len(room.server.names(CONFIG_MAP)) > 1:
        room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}", f"Secret/{NAME}-token", f"JobSet/{NAME}"]
    assert room.jobs.count_active() == 1


def test_pass_interrupted_by_the_database_leaves_no_plan_for_the_next(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job cancelled between two passes is not created from the plan of the first."""

    def fail(*_: object) -> None:
        raise OperationalError("UPDATE cluster_jobs", {}, Exception("the server closed the connection"))

    other = TRAIN.model_copy(update={"id": "f" * 32})
    room.submit()
    room.reconcile()
    room.submit(other)
    with monkeypatch.context() as patched:
        patched.setattr(ClusterJobs, "set_state", fail)  # of the first job, which Kueue has not seen yet
        with pytest.raises(OperationalError):
            room.reconcile()
    room.jobs.want_cancel(other)
    room.reconcile()
    assert room.server.names(JOB_SET) == [NAME]
    assert room.jobs.get(other).reason is ExitReason.CANCELLED


def test_missing_priority_class_is_named_with_the_command_that_creates_it(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority_classes, "INTERVAL_SECONDS", 0.0)
    room.submit()
    room.reconcile()
    room.gang().job_set["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    detail = room.reconcile().detail
    assert "Kueue has no WorkloadPriorityClass 'batch'" in detail and "hanzo-ml cluster render | kubectl apply" in detail
    metadata = {"name": "batch"}
    room.server.put({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": metadata})
    assert room.reconcile().detail == "waits for Kueue to see it"


NOT_ASSIGNED = "couldn't assign flavors to pod set node: "
A100 = "insufficient unused quota for nvidia.com/gpu in flavor nvidia-a100-80gb, 4 more needed"
NO_GPUS = (
    "insufficient quota for nvidia.com/gpu in flavor cpu, previously considered podsets requests (0) + current podset "
    "request (8) > maximum capacity (0)"
)
TOO_LARGE = NO_GPUS.replace("flavor cpu", "flavor nvidia-a100-80gb").replace("(0)", "(4)")
H100 = "flavor nvidia-h100-80gb doesn't match node affinity"
TAINT = "untolerated taint {nvidia.com/gpu present NoSchedule <nil>} in flavor nvidia-h100-80gb"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (f"{NOT_ASSIGNED}{NO_GPUS}, {A100}", f"{NOT_ASSIGNED}{A100}"),
        (f"{NOT_ASSIGNED}{H100}, {NO_GPUS}, {TOO_LARGE}", f"{NOT_ASSIGNED}{TOO_LARGE}"),
        (f"{NOT_ASSIGNED}{A100}, {TAINT}", f"{NOT_ASSIGNED}{A100}"),
        (
            f"{NOT_ASSIGNED}{A100}, {TAINT}. Pending the preemption of 1 workload(s)",
            f"{NOT_ASSIGNED}{A100}. Pending the preemption of 1 workload(s)",
        ),
        (f"{NOT_ASSIGNED}{H100}, {NO_GPUS}", f"{NOT_ASSIGNED}{H100}, {NO_GPUS}"),
        ("LocalQueue hanzo-ml doesn't exist", "LocalQueue hanzo-ml doesn't exist"),
    ],
)
def test_queue_names_only_flavors_that_the_job_can_use(room: Room, words: str, shown: str) -> None:
    room.submit()
    room.reconcile()
    room.gang().wait_for_quota(words)
    assert room.reconcile().detail == shown


def test_job_without_retries_runs_to_its_end_and_leaves_nothing(room: Room) -> None:
    gang = room.start(TRAIN.model_copy(update={"schedule": Schedule(retries=0)}))
    room.attempts.end(TRAIN, 1, ExitReason.COMPLETED, "")
    row = room.reconcile()  # at once, not seconds later when the cluster reports it
    assert (row.phase, row.reason, row.attempt) == (Phase.SUCCEEDED, ExitReason.COMPLETED, 1)
    room.reconcile()
    gang.delete_pods()
    room.reconcile()
    assert room.objects() == []
    with room.database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM program_tokens").scalar_one() == 0


def test_pods_that_share_work_run_until_the_last_has_ended(room: Room) -> None:
    gang = room.start(TRAIN.model_copy(update={"pods": 2}), nodes=2)
    room.attempts.end(TRAIN, 1, ExitReason.COMPLETED, "")
    gang.end(0, 0, "Completed")
    assert room.reconcile().phase is Phase.RUNNING
    gang.change(condition("Completed", "jobset completed successfully"))
    assert room.reconcile().phase is Phase.SUCCEEDED


def test_preemption_suspends_and_resumes_without_counting(room: Room) -> None:
    gang = room.start()
    for attempt in range(1, 4):
        room.attempts.end(TRAIN, attempt, ExitReason.PREEMPTED, "saved checkpoint 7")
        gang.suspend("Preempted to accommodate a workload (UID: 7) due to prioritization in the ClusterQueue")
        row = room.reconcile()
        assert (row.phase, row.reason, row.attempt) == (Phase.SUSPENDED, ExitReason.PREEMPTED, attempt)
        assert "Preempted to accommodate" in row.detail and "8 more needed" in row.detail
        gang.admit()
        assert room.reconcile().phase is Phase.RESTARTING
        assert room.claim(gang.start()) == attempt + 1
        assert room.reconcile().phase is Phase.RUNNING
    assert not any(attempt.counted for attempt in room.attempts.list(TRAIN))


def test_pods_killed_at_the_end_of_their_grace_period_count_as_preempted(room: Room) -> None:
    gang = room.start()
    gang.end(0, 137)
    room.view.pods.refresh()
    gang.suspend("Preempted to accommodate a workload")
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.SUSPENDED, ExitReason.PREEMPTED)
    assert not room.attempts.list(TRAIN)[0].counted


def test_killed_pods_count_as_preempted_when_their_gang_is_readmitted_at_once(room: Room) -> None:
    """Kueue had another GPU type and readmitted the gang before the controller's next pass.

    The job used to fail as killed.
    """
    gang = room.start()
    gang.end(0, 137)
    room.view.pods.refresh()
    gang.suspend("Preempted to accommodate a workload")
    gang.set_workload(condition("QuotaReserved"), condition("Admitted") | {"lastTransitionTime": timestamp(20)})
    gang.change(suspend=False)
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.RESTARTING, ExitReason.PREEMPTED)
    assert not room.attempts.list(TRAIN)[0].counted


def test_preempted_pods_that_reported_nothing_are_taken_as_preempted(room: Room) -> None:
    room.start().suspend("Preempted to accommodate a workload")
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.SUSPENDED, ExitReason.PREEMPTED)


def test_out_of_memory_of_one_pod_is_the_reason_of_the_attempt(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    gang.end(1, 137, "OOMKilled")
    row = room.reconcile()
    assert row.reason is ExitReason.OOM_KILLED
    assert f"{NAME}-node-0-1-1" in row.detail and "its limit is 4Gi" in row.detail
    # The first pod noticed only that the other is gone.
    assert room.attempts.report_exit(TRAIN, 1, ExitReason.NODE_LOST, "node 1 is silent").reason is ExitReason.OOM_KILLED


def test_vague_report_of_survivors_is_replaced_by_the_observation_of_the_cluster(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    room.attempts.report_exit(TRAIN, 1, ExitReason.NODE_LOST, "node 1 is silent")
    assert room.reconcile().reason is ExitReason.NODE_LOST
    gang.end(1, 137)
    row = room.reconcile()
    assert row.reason is ExitReason.KILLED and room.attempts.list(TRAIN)[0].counted


def test_full_disk_fails_the_job_with_the_message_of_the_kubelet(room: Room) -> None:
    gang = room.start()
    words = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    gang.end(0, 137, reason="Error")
    ended = {"terminated": {"exitCode": 137, "message": "the last lines of its log"}}
    gang.set_container(0, ended, "Failed", reason="Evicted", message=words)
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.STORAGE_FULL) and words in row.detail


def test_pod_evicted_for_its_own_disk_usage_is_counted_although_its_launcher_reported_a_preemption(room: Room) -> None:
    gang = room.start()
    room.attempts.report_exit(TRAIN, 1, ExitReason.PREEMPTED, "got a SIGTERM")
    ended = {"terminated": {"exitCode": 143, "reason": "Error"}}
    gang.set_container(0, ended, "Failed", reason="Evicted", message="The node was low on resource: ephemeral-storage.")
    assert room.reconcile().reason is ExitReason.PREEMPTED and not room.attempts.list(TRAIN)[0].counted
    words = 'Usage of EmptyDir volume "work" exceeds the limit "96Mi".'
    gang.set_container(0, ended, "Failed", reason="Evicted", message=words)
    row = room.reconcile()
    [attempt] = room.attempts.list(TRAIN)
    assert (attempt.reason, attempt.counted) == (ExitReason.STORAGE_FULL, True) and words in row.detail


def test_silent_pod_that_is_killed_after_its_grace_period_is_not_counted(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    room.attempts.report_exit(TWO_NODES, 1, ExitReason.NODE_LOST, "node 1 sent no heartbeat for 10 s")
    gang.end(1, 137)
    terminated = gang.pods[1]["status"]["containerStatuses"][0]["state"]["terminated"]
    terminated["finishedAt"] = "2100-01-01T00:00:00Z"  # much later than the attempt
    room.server.put(gang.pods[1])
    assert room.reconcile().reason is ExitReason.NODE_LOST
    assert not room.attempts.list(TRAIN)[0].counted


def test_lost_node_is_not_counted_and_its_pods_are_removed(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    room.server.put(node("node-1", ready="Unknown"))
    assert room.reconcile().phase is Phase.RUNNING
    gang.pods[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    room.server.put(gang.pods[1])
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.RESTARTING, ExitReason.NODE_LOST) and "node node-1 was lost" in row.detail
    assert len(room.server.names(Kind("v1", "Pod", "pods"))) == 1
    assert not room.attempts.list(TRAIN)[0].counted
    [last_state] = [item for _, _, event, item in room.server.events if event == "DELETED" and item["kind"] == "Pod"]
    assert last_state["status"]["phase"] == "Failed"  # otherwise its Job waits for it, because no other pod ends there


def test_pods_of_a_node_that_answers_are_left_to_their_grace_period(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    gang.pods[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    room.server.put(gang.pods[1])
    room.reconcile()
    assert len(room.server.names(Kind("v1", "Pod", "pods"))) == 2


def test_gang_that_keeps_ending_with_75_fails_at_its_limit(room: Room) -> None:
    job = TRAIN.model_copy(update={"schedule": Schedule(retries=2)})
    gang = room.start(job)
    for attempt in range(1, 4):
        room.attempts.end(TRAIN, attempt, ExitReason.RESTART_REQUESTED, "smaller batches")
        gang.delete_pods()
        row = room.reconcile()
        if attempt < 3:
            assert row.phase is Phase.RESTARTING
            room.claim(gang.start())
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.RESTART_REQUESTED)
    assert row.detail == "smaller batches (3 attempts failed)"
    for _ in range(2):
        room.reconcile()
    assert room.objects() == []


def test_checkpoint_resets_the_count_of_earlier_restarts(room: Room) -> None:
    job = TRAIN.model_copy(update={"schedule": Schedule(retries=2)})
    gang = room.start(job)
    for attempt in range(1, 6):
        if attempt == 3:
            room.attempts.record_checkpoint(TRAIN, attempt)
        room.attempts.end(TRAIN, attempt, ExitReason.KILLED, "killed")
        gang.delete_pods()
        row = room.reconcile()
        if attempt < 5:
            assert row.phase is Phase.RESTARTING
            room.claim(gang.start())
    assert (row.phase, row.detail) == (Phase.FAILED, "killed (3 attempts failed)")


def test_pods_that_die_before_they_claim_an_attempt_count(room: Room) -> None:
    job = TRAIN.model_copy(update={"schedule": Schedule(retries=1)})
    room.submit(job)
    room.reconcile()
    gang = room.gang()
    gang.admit()
    for _ in range(2):
        gang.start()
        gang.end(0, 137)
        row = room.reconcile()
        gang.delete_pods()
    assert (row.phase, row.reason, row.attempt) == (Phase.FAILED, ExitReason.KILLED, 2)


def test_bad_configuration_fails_at_once(room: Room) -> None:
    gang = room.start()
    room.attempts.end(TRAIN, 1, ExitReason.BAD_CONFIGURATION, "learning_rate is negative: use a positive number")
    gang.end(0, 78)
    row = room.reconcile()
    assert (row.phase, row.detail) == (Phase.FAILED, "learning_rate is negative: use a positive number")


def test_failed_job_set_reports_why_its_pod_ended(room: Room) -> None:
    gang = room.start()
    gang.end(0, 1, message="Traceback\nModuleNotFoundError: No module named 'recipes'")
    gang.change(condition("Failed", "jobset failed due to one or more job failures"))
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.PROGRAM_ERROR)
    assert "ended with exit code 1" in row.detail and "No module named 'recipes'" in row.detail


def test_starting_names_the_event_that_holds_the_pod(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    gang.start(running=False)
    name = gang.pods[0]["metadata"]["name"]
    gang.warn(name, 'MountVolume.SetUp failed for volume "data" : configmap "data" not found', "FailedMount")
    row = room.reconcile()
    assert row.phase is Phase.STARTING
    assert row.detail == f'pod {name}: MountVolume.SetUp failed for volume "data" : configmap "data" not found'


def test_gang_with_an_unschedulable_pod_is_starting_and_reports_it(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    room.claim(gang.start(2), 2)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unschedulable = condition("PodScheduled", words, status="False", reason="Unschedulable")
    gang.set_container(1, {}, "Pending", conditions=[unschedulable])
    row = room.reconcile()
    assert row.phase is Phase.STARTING and words in row.detail
    gang.set_container(1, {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
    assert room.reconcile().phase is Phase.RUNNING


def test_image_that_cannot_be_pulled_fails_after_its_limit_with_the_registry_message(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    gang.start(running=False)
    words = 'failed to resolve reference "registry/x:1": not found'
    gang.set_container(0, {"waiting": {"reason": "ImagePullBackOff", "message": words}})
    row = room.reconcile()
    assert row.phase is Phase.STARTING and words in row.detail
    gang.pods[0]["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    room.server.put(gang.pods[0])
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.BAD_CONFIGURATION) and words in row.detail
    room.reconcile()
    assert room.server.names(JOB_SET) == []


def test_child_that_the_api_server_refuses_fails_the_job(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    words = 'Job.batch "x" is invalid: spec.template.spec.tolerations[0].operator: Invalid value'
    gang.warn(NAME, words, "JobCreationFailed")
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.BAD_CONFIGURATION) and words in row.detail


@pytest.mark.parametrize(
    ("status", "message", "phase"),
    [
        (422, 'JobSet.jobset.x-k8s.io "x" is invalid: spec.replicatedJobs: Invalid value', Phase.FAILED),
        (403, 'admission webhook "vjobset.kb.io" denied the request: too long', Phase.FAILED),
        (500, 'Internal error occurred: failed calling webhook "mjobset.kb.io": connection refused', Phase.PENDING),
        (403, "configmaps is forbidden: exceeded quota: compute, requested: pods=1", Phase.PENDING),
    ],
)
def test_refusal_is_reported_and_fails_the_job_only_if_it_is_invalid(
    room: Room, status: int, message: str, phase: Phase
) -> None:
    room.submit()
    room.server.refusal = (status, message)
    row = room.reconcile()
    assert row.phase is phase and message in row.detail
    room.server.refusal = None
    room.start_controller()
    assert room.reconcile().phase is phase


def test_cancelled_job_is_deleted_and_over_when_its_pods_are_gone(room: Room) -> None:
    gang = room.start()
    room.jobs.want_cancel(TRAIN)
    row = room.reconcile()
    assert room.server.names(JOB_SET) == []
    assert row.phase is Phase.RUNNING and "may still save a checkpoint" in row.detail
    gang.delete_pods()
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.CANCELLED)
    room.reconcile()
    assert room.objects() == []


def test_cancelled_job_in_the_queue_ends_at_once(room: Room) -> None:
    room.submit()
    room.jobs.want_cancel(TRAIN)
    assert room.reconcile().reason is ExitReason.CANCELLED
    assert room.objects() == []


def test_job_set_deleted_by_hand_is_created_again_and_the_attempt_ended(room: Room) -> None:
    gang = room.start()
    room.server.remove(JOB_SET.path("hanzo-ml", NAME))
    row = room.reconcile()
    assert row.phase is Phase.RESTARTING and "waits for 1 pod of the previous attempt to end" in row.detail
    assert room.server.names(JOB_SET) == []
    gang.delete_pods()
    row = room.reconcile()
    assert room.server.names(JOB_SET) == [NAME]
    assert (row.phase, row.reason) == (Phase.RESTARTING, ExitReason.KILLED)
    assert row.detail == "the objects of the job were deleted from the cluster"


def test_deletion_spares_objects_that_have_replaced_those_it_is_for(room: Room) -> None:
    gang = room.start(TWO_NODES, nodes=2)
    config_map = room.server.find(CONFIG_MAP, NAME)
    assert config_map is not None
    room.jobs.want_cancel(TRAIN)
    gang.pods[1]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    room.server.remove("/api/v1/nodes/node-1")
    for mirror in room.view.mirrors:
        mirror.refresh()
    replaced = [config_map, gang.job_set, gang.pods[1]]
    for item in replaced:
        room.server.put(copy.deepcopy(item) | {"metadata": item["metadata"] | {"uid": f"new-{item['metadata']['uid']}"}})
    room.reconciler.reconcile()  # from stale mirrors: the deletion event had not arrived yet
    assert room.server.names(JOB_SET) == [NAME] and len(room.server.names(POD)) == 2
    delete_rest(room.server.cluster, config_map, room.scheduler)
    assert room.server.names(CONFIG_MAP) == [NAME]


def test_used_time_of_all_attempts_ends_a_job(room: Room) -> None:
    job = TRAIN.model_copy(update={"schedule": Schedule(max_duration="1s")})
    gang = room.start(job)
    with room.database.write() as connection:
        connection.exec_driver_sql("UPDATE job_attempts SET started_at = started_at - 2000")
        connection.exec_driver_sql("UPDATE cluster_jobs SET created_at = created_at - 5000")
    row = room.reconcile()
    assert not row.has_ended and room.server.names(JOB_SET) == []
    gang.delete_pods()
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.TIMED_OUT) and "max_duration (1s)" in row.detail


def test_time_limit_of_kueue_is_written_before_the_gang_that_shows_it_is_deleted(room: Room) -> None:
    gang = room.start()
    reason = "DeactivatedDueToMaximumExecutionTimeExceeded"
    gang.set_workload(condition("Evicted", "exceeding the maximum execution time", reason=reason))
    gang.change(suspend=True)
    row = room.reconcile()
    assert not row.has_ended and room.server.names(JOB_SET) == [NAME]
    gang.delete_pods()
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.TIMED_OUT)
    room.reconcile()
    assert room.server.names(JOB_SET) == []


def test_child_that_a_webhook_denies_may_pass_later(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    words = 'admission webhook "mjob.kb.io" denied the request: JobSet.jobset.x-k8s.io "x" not found'
    gang.warn(NAME, words, "JobCreationFailed")
    row = room.reconcile()
    assert row.phase is Phase.STARTING and words in row.detail


def test_pods_of_a_failed_job_are_kept_for_a_time_where_it_asks_for_that(room: Room) -> None:
    job = TRAIN.model_copy(update={"pod": PodSettings(keep_failed=True)})
    gang = room.start(job)
    token = room.token()
    room.attempts.end(TRAIN, 1, ExitReason.PROGRAM_ERROR, "it exited with 3")
    assert room.reconcile().phase is Phase.RUNNING  # its pods exit after they have reported
    gang.end(0, 1)
    gang.change(condition("Failed", reason="FailJobSetFailurePolicyAction"))
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.PROGRAM_ERROR)
    name = gang.pods[0]["metadata"]["name"]
    assert row.detail.startswith("it exited with 3; its pods are kept until ")
    assert f"`kubectl -n hanzo-ml describe pods -l ml.hanzo.ai/job={NAME}`, `kubectl -n hanzo-ml logs {name}`" in row.detail
    room.reconcile()
    assert f"JobSet/{NAME}" in room.objects()
    assert not room.is_valid(token)
    room.set_row(updated_at=row.updated_at - 25 * 3_600_000)
    for _ in range(2):
        room.reconcile()
        gang.delete_pods()
    room.reconcile()
    assert room.objects() == []


def test_kept_pods_are_removed_when_the_job_is_resumed(room: Room) -> None:
    gang = room.start(TRAIN.model_copy(update={"pod": PodSettings(keep_failed=True)}))
    room.attempts.end(TRAIN, 1, ExitReason.PROGRAM_ERROR, "it exited with 3")
    gang.end(0, 1)
    gang.change(condition("Failed", reason="FailJobSetFailurePolicyAction"))
    room.reconcile()
    room.jobs.acknowledge_end(TRAIN)
    room.submit()
    room.reconcile()
    gang.delete_pods()
    for _ in range(2):
        room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}-g2", f"Secret/{NAME}-g2-token", f"JobSet/{NAME}-g2"]


def test_gang_that_keeps_failed_pods_is_recreated_for_its_next_attempt(room: Room) -> None:
    gang = room.start(TRAIN.model_copy(update={"pod": PodSettings(keep_failed=True)}))
    assert gang.job_set["spec"]["failurePolicy"]["maxRestarts"] == 0
    room.attempts.end(TRAIN, 1, ExitReason.KILLED, "killed")
    gang.end(0, 75)
    gang.change(condition("Failed", reason="ReachedMaxRestarts"))
    assert room.reconcile().phase is Phase.RESTARTING
    assert f"JobSet/{NAME}" not in room.objects()
    gang.delete_pods()
    room.reconcile()
    assert f"JobSet/{NAME}" in room.objects()


def test_image_that_cannot_be_pulled_is_not_kept_with_its_gpus(room: Room) -> None:
    room.submit(TRAIN.model_copy(update={"pod": PodSettings(keep_failed=True)}))
    room.reconcile()
    gang = room.gang()
    gang.admit()
    gang.start(running=False)
    gang.set_container(0, {"waiting": {"reason": "InvalidImageName", "message": "couldn't parse image name"}})
    assert room.reconcile().reason is ExitReason.BAD_CONFIGURATION
    room.reconcile()
    assert f"JobSet/{NAME}" not in room.objects()


def test_pod_that_was_deleted_before_it_started_is_named(room: Room) -> None:
    room.submit(TWO_NODES)
    room.reconcile()
    gang = room.gang()
    gang.admit()
    gang.start(2, running=False)
    names = [gang.pods[rank]["metadata"]["name"] for rank in (0, 1)]
    gang.mark_deleted(1)
    gang.mark_deleted(0, later=5)  # a consequence of the first deletion
    room.reconcile()
    gang.delete_pods()
    gang.start(2, running=False)
    row = room.reconcile()
    assert row.phase is Phase.STARTING
    assert row.detail.startswith(f"pod {names[1]} was deleted before it started; pod {NAME}-node-0-0-2")


def test_pod_preempted_before_its_start_is_reported_with_the_cause(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    gang.start(running=False)
    words = "default-scheduler: preempting to accommodate a higher priority pod"
    gang.pods[0]["status"]["conditions"].append(condition("DisruptionTarget", words, reason="PreemptionByScheduler"))
    gang.mark_deleted(0)
    room.reconcile()
    gang.delete_pods()
    gang.start(running=False)
    assert f"was deleted before it started ({words})" in room.reconcile().detail


def test_pods_of_a_suspended_gang_are_not_reported_as_deleted(room: Room) -> None:
    room.submit()
    room.reconcile()
    gang = room.gang()
    gang.admit()
    owner = gang.start(running=False, owner="the-child")
    gang.mark_deleted(0)
    room.reconcile()
    gang.suspend("Preempted to accommodate a workload")
    room.reconcile()
    gang.admit()
    assert gang.start(running=False, owner="the-child") != owner
    assert "was deleted" not in room.reconcile().detail


def test_other_work_waits_until_pods_of_the_earlier_generation_are_gone(room: Room) -> None:
    gang = room.start()
    room.submit(TRAIN.model_copy(update={"parameters": {"steps": 2}}))
    row = room.reconcile()
    assert room.server.names(JOB_SET) == [] and "waits for 1 pod" in row.detail
    gang.delete_pods()
    for _ in range(2):
        room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}-g2", f"Secret/{NAME}-g2-token", f"JobSet/{NAME}-g2"]


def elastic_job(nodes: int = 4, gpus: int = 8) -> Job:
    shape = Distributed(strategy="fsdp", num_nodes=nodes, gpus_per_node=gpus, elastic=Elastic(min_nodes=2, wait="60s"))
    return TRAIN.model_copy(update={"distributed": shape, "hardware": Hardware(gpus=gpus)})


def test_elastic_job_continues_on_the_free_nodes_after_its_wait(room: Room) -> None:
    gang = room.start(elastic_job(), nodes=4)
    room.attempts.end(TRAIN, 1, ExitReason.PREEMPTED, "saved checkpoint 7")
    gang.suspend("Preempted to accommodate a workload")
    room.reconcile()
    assert room.row.generation == 1
    waiting = "insufficient unused quota for nvidia.com/gpu in flavor gpu, 12 more needed"
    gang.set_workload(condition("QuotaReserved", waiting, status="False"), created="2026-01-01T00:00:00Z")
    for _ in range(2):
        room.reconcile()
    assert room.objects() == [f"ConfigMap/{NAME}-g2", f"Secret/{NAME}-g2-token", f"JobSet/{NAME}-g2"]
    smaller = room.gang(f"{NAME}-g2")
    assert smaller.job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 2
    smaller.admit()
    assert room.claim(smaller.start(2), 2) == 2
    row = room.reconcile()
    assert (row.phase, row.attempt) == (Phase.RUNNING, 2)
    smaller.suspend("Preempted again")
    smaller.set_workload(condition("QuotaReserved", waiting, status="False"), created="2026-01-01T00:00:00Z")
    room.reconcile()
    assert room.row.generation == 2  # the job accepts no fewer nodes


def test_elastic_job_waits_where_too_few_nodes_are_free(room: Room) -> None:
    room.submit(elastic_job())
    room.reconcile()
    waiting = "insufficient unused quota for nvidia.com/gpu in flavor gpu, 17 more needed"
    room.gang().set_workload(condition("QuotaReserved", waiting, status="False"), created="2026-01-01T00:00:00Z")
    assert room.reconcile().generation == 1


def leave_without_node(room: Room, gang: Gang, rank: int) -> None:
    status = {"phase": "Pending", "conditions": [condition("PodScheduled", "0/4 nodes are available", status="False")]}
    gang.pods[rank] |= {"status": status, "spec": {**gang.pods[rank]["spec"], "nodeName": ""}}
    room.server.put(gang.pods[rank])


def test_admitted_elastic_job_continues_without_the_lost_node_after_its_wait(room: Room) -> None:
    gang = room.start(elastic_job(), nodes=4)
    room.attempts.end(TRAIN, 1, ExitReason.NODE_LOST, "node-3 was lost", ended_at=1)
    gang.delete_pods()
    uid = gang.start(4)
    leave_without_node(room, gang, 3)
    row = room.reconcile()
    assert (row.generation, row.phase) == (1, Phase.RESTARTING)
    assert "no node for pod" in row.detail and "0/4 nodes are available" in row.detail
    room.claim(uid, 4)
    assert room.reconcile().phase is Phase.RESTARTING, "the other nodes wait for it"
    long_ago = condition("Admitted") | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    gang.set_workload(condition("QuotaReserved"), long_ago)
    for _ in range(2):
        row = room.reconcile()
    assert row.generation == 2
    gang.delete_pods()
    room.reconcile()
    smaller = room.gang(f"{NAME}-g2").job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert smaller["completions"] == 3


def test_used_time_and_counted_attempts_carry_over_to_the_smaller_generation(room: Room) -> None:
    job = elastic_job().model_copy(update={"schedule": Schedule(retries=1, max_duration="1h")})
    gang = room.start(job, nodes=4)
    room.attempts.end(TRAIN, 1, ExitReason.KILLED, "killed", ended_at=now_ms() + 600_000)
    gang.suspend("Preempted to accommodate a workload")
    waiting = "insufficient unused quota for nvidia.com/gpu in flavor gpu, 12 more needed"
    gang.set_workload(condition("QuotaReserved", waiting, status="False"), created="2026-01-01T00:00:00Z")
    for _ in range(2):
        room.reconcile()
    smaller = room.gang(f"{NAME}-g2")
    assert int(smaller.job_set["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"]) == 3000
    smaller.admit()
    assert room.claim(smaller.start(2), 2) == 2
    room.attempts.end(TRAIN, 2, ExitReason.KILLED, "killed again")
    row = room.reconcile()
    assert (row.phase, row.detail) == (Phase.FAILED, "killed again (2 attempts failed)")


def test_resumed_job_reports_that_it_waits_for_pods_that_still_save(room: Room) -> None:
    gang = room.start()
    gang.pods[0]["metadata"] |= {"deletionTimestamp": timestamp(), "deletionGracePeriodSeconds": 300}
    room.server.put(gang.pods[0])
    row = room.reconcile()
    assert (row.phase, row.detail) == (Phase.RESTARTING, "waits for 1 pod of the previous attempt to end")


def test_gang_that_kueue_stopped_and_forgot_is_queued_again(room: Room) -> None:
    gang = room.start()
    room.attempts.end(TRAIN, 1, ExitReason.RESTART_REQUESTED, "smaller batches")
    gang.delete_pods()
    gang.change(suspend=True)
    long_ago = condition("Evicted", "Exceeded the PodsReady timeout") | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    gang.set_workload(long_ago, condition("QuotaReserved"))
    for _ in range(2):
        room.reconcile()
    assert room.server.names(JOB_SET) == [f"{NAME}-g2"]
    assert room.row.attempt == 1


def test_pull_failure_of_a_known_image_is_a_supervisor_failure(room: Room) -> None:
    gang = room.start()
    room.attempts.end(TRAIN, 1, ExitReason.KILLED, "killed")
    gang.delete_pods()
    gang.start(running=False)
    gang.set_container(0, {"waiting": {"reason": "ImagePullBackOff", "message": "connection refused"}})
    gang.pods[0]["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    room.server.put(gang.pods[0])
    row = room.reconcile()
    assert (row.phase, row.reason) == (Phase.FAILED, ExitReason.SUPERVISOR_FAILED) and "connection refused" in row.detail


def test_unreadable_job_does_not_stop_the_others(room: Room) -> None:
    other = a_job(tracking=None).model_copy(update={"id": "unreadable"})
    room.submit(other)
    with room.database.write() as connection:
        connection.exec_driver_sql("UPDATE cluster_jobs SET document = '{}' WHERE job_id = 'unreadable'")
    ours = {"app": "hanzo-ml-job"}
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mine", "namespace": "hanzo-ml", "labels": ours},
    }
    room.server.put(foreign)
    room.submit()
    room.reconcile()
    assert room.server.names(JOB_SET) == [NAME]


def test_objects_applied_by_hand_stay(room: Room) -> None:
    room.submit()
    room.reconcile()
    with room.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM cluster_jobs")
    room.reconciler.reconcile()
    assert room.server.names(JOB_SET) == [NAME]


def test_name_taken_by_other_work_fails_with_the_command_that_frees_it(room: Room) -> None:
    room.submit()
    room.reconcile()
    with room.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM cluster_jobs")
    room.server.remove(JOB_SET.path("hanzo-ml", NAME))
    room.submit(TRAIN.model_copy(update={"parameters": {"steps": 2}}))
    row = room.reconcile()
    assert row.phase is Phase.FAILED and f"kubectl -n hanzo-ml delete configmaps {NAME}" in row.detail


def test_failed_indexed_job_of_several_pods_is_created_again(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with serving_controller() as server:
        room = Room(server, database)
        room.scheduler = Scheduler(gang_backend="indexed_job")
        room.start_controller()
        room.submit(TWO_NODES)
        room.reconcile()
        assert room.objects() == [f"ConfigMap/{NAME}", f"Secret/{NAME}-token", f"Service/{NAME}", f"Job/{NAME}"]
        job = server.find(JOB, NAME)
        assert job is not None
        job["spec"]["replicatedJobs"] = [{"template": {"spec": {"template": job["spec"]["template"]}}}]
        gang = Gang(server, job)
        room.claim(gang.start(2), 2)
        assert room.reconcile().phase is Phase.RUNNING
        room.attempts.end(TRAIN, 1, ExitReason.NODE_LOST, "node 1 is silent")
        gang.change(condition("Failed", reason="BackoffLimitExceeded"))
        assert room.reconcile().phase is Phase.RESTARTING
        assert server.names(JOB) == []
        gang.delete_pods()
        room.reconcile()
        assert server.names(JOB) == [NAME]
    database.close()
