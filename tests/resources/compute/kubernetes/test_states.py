"""Parsing of objects from a real cluster (`snapshots.json`).

Recorded with JobSet 0.12, Kueue 0.19 and Kubernetes 1.36.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from resources.compute.kubernetes.exits import explain_pod
from resources.compute.kubernetes.phases import describe_queue
from resources.compute.kubernetes.states import lost_nodes, read_gang, read_pod, read_workload
from resources.compute.kubernetes.view import sort_queues

SNAPSHOTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "snapshots.json").read_text())


def test_running_gang_is_admitted_and_its_pod_runs() -> None:
    found = SNAPSHOTS["running"]
    gang, workload, pod = read_gang(found["JobSet"]), read_workload(found["Workload"]), read_pod(found["Pod"])
    assert (gang.suspended, gang.ended, gang.generation, gang.restarts_itself) == (False, None, 1, True)
    assert workload.owner == gang.uid and workload.holds_quota
    assert workload.admitted_at is not None and workload.admitted_at >= gang.created_at
    assert pod.running and pod.rank == 0 and pod.node and pod.scheduled_at >= pod.created_at
    assert explain_pod(pod, ()) is None


def test_gang_larger_than_the_quota_reports_the_message_of_kueue() -> None:
    found = SNAPSHOTS["too large"]
    assert read_gang(found["JobSet"]).suspended
    workload = read_workload(found["Workload"])
    assert not workload.holds_quota and workload.admitted_at is None
    assert "insufficient quota for nvidia.com/gpu in flavor gpu" in describe_queue(workload)


def test_preempted_gang_says_why_without_identifiers() -> None:
    found = SNAPSHOTS["preempted"]
    gang, workload = read_gang(found["JobSet"]), read_workload(found["Workload"])
    assert gang.suspended and not workload.holds_quota and workload.admitted_at is None
    words = describe_queue(workload)
    assert words.startswith("Preempted to accommodate a workload due to prioritization in the ClusterQueue")
    assert "more needed" in words and "UID" not in words


def test_queue_is_in_the_order_of_priority_and_age() -> None:
    workloads = [read_workload(SNAPSHOTS[name]["Workload"]) for name in ("preempted", "too large", "running")]
    preempted, too_large, _ = workloads
    # The larger one is pending with a higher priority; the running one is not pending.
    assert sort_queues(workloads) == {too_large.queue: [too_large, preempted]}


def test_missing_image_is_reported_with_the_message_of_the_registry() -> None:
    pod = read_pod(SNAPSHOTS["image missing"]["Pod"])
    assert pod.waiting in ("ErrImagePull", "ImagePullBackOff")
    assert "failed to resolve image" in pod.message and pod.image == "localhost/absent:1"


def test_pod_with_a_child_killed_for_memory_is_out_of_memory_despite_its_exit_code() -> None:
    pod = read_pod(SNAPSHOTS["ended by itself"]["Pod"])
    ended = explain_pod(pod, ())
    assert pod.exit_code == 75 and pod.has_ended
    assert ended is not None and ended.reason is ExitReason.OOM_KILLED and "its limit is 1Gi" in ended.message


@pytest.mark.parametrize(("status", "lost"), [("True", False), ("False", False), ("Unknown", True)])
def test_node_with_unknown_status_is_lost(status: str, lost: bool) -> None:
    node = json.loads(json.dumps(SNAPSHOTS["node"]["Node"]))
    [ready] = [condition for condition in node["status"]["conditions"] if condition["type"] == "Ready"]
    ready["status"] = status
    assert bool(lost_nodes([node])) is lost


def test_unreported_exit_is_read_from_the_termination_message() -> None:
    document = ExitDocument(code=None, message="the API refuses this pod (401)", reason=ExitReason.SUPERVISOR_FAILED)
    item = copy.deepcopy(SNAPSHOTS["ended by itself"]["Pod"])
    item["status"]["containerStatuses"][0]["state"] = {
        "terminated": {"exitCode": 1, "reason": "Error", "message": document.model_dump_json()}
    }
    ended = explain_pod(read_pod(item), ())
    assert ended is not None
    assert ended.reason is ExitReason.SUPERVISOR_FAILED and ended.message.endswith(": the API refuses this pod (401)")
