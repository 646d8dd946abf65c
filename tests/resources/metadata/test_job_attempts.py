"""Attempts of a cluster program: idempotent claims fence earlier ones; the first known end counts."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import insert, update

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Program
from resources.compute.base import JobRef
from resources.errors import ErrorCode, HanzoError
from resources.metadata.database import Database
from resources.metadata.job_attempts import Claim, JobAttempts
from resources.metadata.jobs import Jobs
from resources.metadata.outbox import read_after
from resources.metadata.tables import cluster_jobs
from resources.monitoring.usage_totals import read_totals

JOB = JobRef("j", Program.TRAIN)
CLAIM = Claim(generation=2, pod_uid="uid-a", node_rank=0, num_nodes=2, node="node-a", gpus=("GPU-1",))


@pytest.fixture
def attempts(database: Database) -> JobAttempts:
    row: dict[str, Any] = {
        "job_id": JOB.id,
        "program": JOB.program,
        "namespace": "hanzo-ml",
        "name": "train-j",
        "generation": 2,
        "document": {},
        "wanted": "run",
        "phase": "pending",
        "detail": "",
        "attempt": 0,
        "created_at": 1,
        "updated_at": 1,
    }
    with database.write() as connection:
        connection.execute(insert(cluster_jobs).values(**row))
    return JobAttempts(database)


def set_row(database: Database, **values: Any) -> None:
    with database.write() as connection:
        connection.execute(update(cluster_jobs).values(**values))


def started_events(database: Database) -> list[tuple[list[str], list[str]]]:
    with database.read() as connection:
        found = read_after(connection, 0, ("job.started",), limit=100)
    return [(event.payload["node_ids"], event.payload["gpu_ids"]) for event in found]


def test_claim_is_idempotent_by_pod_and_a_new_pod_gets_the_next_number(attempts: JobAttempts) -> None:
    first = attempts.claim(JOB, CLAIM)
    assert (first.attempt, first.nodes, first.ended_at) == (1, ["node-a", None], None)
    assert attempts.claim(JOB, CLAIM).attempt == 1
    second = attempts.claim(JOB, replace(CLAIM, pod_uid="uid-b"))
    assert second.attempt == 2
    superseded, newest = attempts.list(JOB)
    assert (superseded.reason, newest.reason) == (ExitReason.UNKNOWN, None)
    assert "attempt 2 replaced it" in superseded.message


def test_reports_of_a_superseded_attempt_are_refused(attempts: JobAttempts) -> None:
    attempts.claim(JOB, CLAIM)
    attempts.claim(JOB, replace(CLAIM, pod_uid="uid-b"))
    for late in (
        lambda: attempts.register_node(JOB, 1, 1, "node-c", ()),
        lambda: attempts.report_exit(JOB, 1, ExitReason.COMPLETED, ""),
    ):
        with pytest.raises(HanzoError, match="attempt 2 has replaced it") as refused:
            late()
        assert refused.value.code is ErrorCode.RESOURCE_CONFLICT


@pytest.mark.parametrize(
    ("row", "claim", "message"),
    [
        ({"wanted": "cancel"}, CLAIM, "cancelled or over"),
        ({"wanted": "nothing"}, CLAIM, "cancelled or over"),
        ({}, replace(CLAIM, generation=1), "generation 2 has replaced it"),
    ],
)
def test_unwanted_pods_get_no_attempt(
    database: Database, attempts: JobAttempts, row: dict[str, Any], claim: Claim, message: str
) -> None:
    set_row(database, **{"wanted": "run", **row})
    with pytest.raises(HanzoError, match=message) as refused:
        attempts.claim(JOB, claim)
    assert refused.value.status == 409
    assert attempts.newest(JOB) is None


def test_claim_of_unknown_program_is_not_found(attempts: JobAttempts) -> None:
    with pytest.raises(HanzoError, match="was not submitted") as refused:
        attempts.claim(JobRef("j", Program.EVALUATE), CLAIM)
    assert refused.value.status == 404


def test_first_end_counts_and_definite_reasons_replace_vague_ones(attempts: JobAttempts) -> None:
    attempts.claim(JOB, CLAIM)
    lost = attempts.report_exit(JOB, 1, ExitReason.NODE_LOST, "node 1 sent no heartbeat for 10 s")
    assert (lost.reason, lost.counted) == (ExitReason.NODE_LOST, False)
    known = attempts.end(JOB, 1, ExitReason.OOM_KILLED, "node 1 ran out of memory")
    assert (known.reason, known.message, known.counted) == (ExitReason.OOM_KILLED, "node 1 ran out of memory", True)
    assert known.ended_at == lost.ended_at
    assert attempts.end(JOB, 1, ExitReason.KILLED, "later").reason is ExitReason.OOM_KILLED
    assert attempts.end(JOB, 1, ExitReason.NODE_LOST, "later").reason is ExitReason.OOM_KILLED


def test_lost_node_remains_the_reason_when_other_pods_report_preemption(attempts: JobAttempts) -> None:
    attempts.claim(JOB, CLAIM)
    attempts.end(JOB, 1, ExitReason.NODE_LOST, "node node-b was lost")
    reported = attempts.report_exit(JOB, 1, ExitReason.PREEMPTED, "asked to stop")
    assert (reported.reason, reported.message) == (ExitReason.NODE_LOST, "node node-b was lost")
    assert attempts.end(JOB, 1, ExitReason.PREEMPTED, "evicted: a more important pod").reason is ExitReason.PREEMPTED


def test_controller_decides_whether_an_end_is_counted(attempts: JobAttempts) -> None:
    attempts.claim(JOB, CLAIM)
    assert not attempts.end(JOB, 1, ExitReason.KILLED, "evicted", counted=False).counted


def test_individually_restarted_pods_join_one_attempt(attempts: JobAttempts) -> None:
    shared = replace(CLAIM, shared=True)
    assert attempts.claim(JOB, shared).attempt == 1
    joined = attempts.claim(JOB, replace(shared, pod_uid="uid-b", node_rank=1, node="node-b"))
    assert (joined.attempt, joined.nodes) == (1, ["node-a", "node-b"])
    assert attempts.claim(JOB, replace(shared, pod_uid="uid-c", node="node-c")).attempt == 1
    attempts.end(JOB, 1, ExitReason.KILLED, "all were killed")
    assert attempts.claim(JOB, replace(shared, pod_uid="uid-d")).attempt == 2


@pytest.mark.requirement("Q1")
@pytest.mark.parametrize("supervisor_first", [True, False])
def test_job_started_names_nodes_and_gpus_once_all_nodes_registered(
    database: Database, attempts: JobAttempts, supervisor_first: bool
) -> None:
    jobs = Jobs(database)
    jobs.submit(name="n", config={}, user="ann", organization="default", id=JOB.id)
    if supervisor_first:
        jobs.start(JOB.id)
    attempts.claim(JOB, CLAIM)
    assert started_events(database) == []
    attempts.register_node(JOB, 1, 1, "node-b", ("GPU-2", "GPU-3"))
    if not supervisor_first:
        assert started_events(database) == []
        jobs.start(JOB.id)
    expected = [(["node-a", "node-b"], ["GPU-1", "GPU-2", "GPU-3"])]
    assert started_events(database) == expected
    attempts.end(JOB, 1, ExitReason.PREEMPTED, "")
    attempts.claim(JOB, replace(CLAIM, pod_uid="uid-b", num_nodes=1))
    assert started_events(database) == expected, "an attempt that resumes the job is no second start of it"


def test_job_started_again_waits_for_the_new_attempt(database: Database, attempts: JobAttempts) -> None:
    jobs = Jobs(database)
    jobs.submit(name="n", config={}, user="ann", organization="default", id=JOB.id)
    one_node = replace(CLAIM, num_nodes=1, gpus=())
    jobs.start(JOB.id)
    attempts.claim(JOB, one_node)
    attempts.end(JOB, 1, ExitReason.PROGRAM_ERROR, "failed")
    jobs.fail(JOB.id, "failed")
    jobs.start(JOB.id)
    assert started_events(database) == [(["node-a"], [])]
    attempts.claim(JOB, replace(one_node, pod_uid="uid-b", node="node-b"))
    assert started_events(database) == [(["node-a"], []), (["node-b"], [])]


@pytest.mark.requirement("Y4")
def test_gpus_are_metered_from_claim_to_end_on_all_nodes(database: Database, attempts: JobAttempts) -> None:
    set_row(database, document={"hardware": {"gpus": 8, "gpu_type": "nvidia-h100-80gb"}})
    Jobs(database).submit(name="j", config={}, user="ann", organization="acme", id=JOB.id)

    def totals() -> tuple[dict[tuple[str, ...], float], float]:
        with database.read() as connection:
            found = read_totals(connection)
        return dict(found.gpus_allocated), sum(found.gpu_hours.values())

    first = attempts.claim(JOB, CLAIM)
    assert totals() == ({("nvidia-h100-80gb",): 16}, 0)
    attempts.meter_gpus()
    attempts.end(JOB, 1, ExitReason.NODE_LOST, "node-a is gone", ended_at=first.started_at + 3_600_000)
    assert totals() == ({}, 16)
    attempts.claim(JOB, replace(CLAIM, pod_uid="uid-b"))
    attempts.end(JOB, 1, ExitReason.OOM_KILLED, "memory ran out")
    assert totals() == ({("nvidia-h100-80gb",): 16}, 16), "the second attempt holds its own"


def test_job_started_is_recorded_when_the_attempt_ended_before_the_job_ran(
    database: Database, attempts: JobAttempts
) -> None:
    """Regression: a command of 5 s completed before its supervisor marked it running.

    No event named its nodes.
    """
    jobs = Jobs(database)
    jobs.submit(name="j", config={}, user="ann", organization="acme", id=JOB.id)
    attempts.claim(JOB, replace(CLAIM, num_nodes=1))
    attempts.end(JOB, 1, ExitReason.COMPLETED, "")
    jobs.start(JOB.id)
    assert started_events(database) == []
    with database.write() as connection:
        jobs.complete(connection, JOB.id, {}, training_seconds=1.0)
    assert started_events(database) == [(["node-a"], ["GPU-1"])]
