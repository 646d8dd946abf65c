"""The test cluster itself: what all tests on it rely on."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.cluster import processes
from tests.cluster.cluster import FAKE, Cluster
from tests.cluster.job_controllers import move_controllers
from tests.cluster.simple_jobs import job, unique

pytestmark = pytest.mark.cluster

NAMESPACE = "smoke"
QUEUE = Path(__file__).with_name("queue.yaml")

# Rank 0 waits for rank 1, which looks up its name and imports what only the mounted volume has.
GREET = """
import os, socket, time
import torch
if os.environ["RANK"] == "0":
    with socket.create_server(("", 29500)) as server:
        connection, _ = server.accept()
        print(connection.recv(100).decode(), "as", os.getuid())
else:
    for _ in range(60):
        try:
            with socket.create_connection((os.environ["RANK_0"], 29500), timeout=5) as connection:
                connection.sendall(f"torch {torch.__version__} on {os.environ['NODE']}".encode())
            break
        except OSError:
            time.sleep(1)
    else:
        raise SystemExit("rank 0 does not answer")
"""

FETCH = """
import sys, urllib.error, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())
try:
    urllib.request.urlopen(sys.argv[1].partition("?")[0], timeout=20)
except urllib.error.HTTPError as refusal:
    print(refusal.code)
"""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.create_namespace(NAMESPACE)
    cluster.kubectl("apply", "--server-side", f"--filename={QUEUE}")
    yield NAMESPACE
    cluster.delete_namespace(NAMESPACE)
    cluster.kubectl("delete", "clusterqueue,resourceflavor", NAMESPACE)


def test_queued_gang_runs_on_two_nodes_and_finds_each_other_by_name(cluster: Cluster, namespace: str) -> None:
    name = unique("gang")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True},
    }
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variables: list[dict[str, Any]] = [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": rank}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "RANK_0", "value": f"{name}-0.{name}"},
    ]
    gang = job(name, namespace, ["python", "-c", GREET], pods=2, env=variables, subdomain=name, gpus=8)
    gang["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": NAMESPACE}
    gang["spec"]["suspend"] = True
    cluster.apply(service)
    run_to_completion(cluster, gang)

    pods = cluster.get("pods", f"--namespace={namespace}", f"--selector=job-name={name}")["items"]
    nodes = {
        pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: pod["spec"]["nodeName"] for pod in pods
    }
    first = next(pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == nodes["0"])
    assert nodes["0"] != nodes["1"]
    log = cluster.kubectl("logs", f"--namespace={namespace}", first)
    assert log.startswith("torch ")
    assert log.strip().endswith(f"on {nodes['1']} as 10001")


def test_pod_fetches_signed_object_and_is_refused_without_signature(cluster: Cluster, namespace: str) -> None:
    key, name = unique("object"), unique("fetch")
    client = cluster.s3.client()
    client.put_object(Bucket="hanzo-ml", Key=key, Body=b"content")
    signed = client.generate_presigned_url("get_object", Params={"Bucket": "hanzo-ml", "Key": key})
    run_to_completion(cluster, job(name, namespace, ["python", "-c", FETCH, signed]))

    assert cluster.kubectl("logs", f"--namespace={namespace}", f"job/{name}").split() == ["content", "403"]


def test_store_refuses_changed_signature(cluster: Cluster) -> None:
    client = cluster.s3.client()
    client.put_object(Bucket="hanzo-ml", Key="smoke/secret", Body=b"content")
    signed = client.generate_presigned_url("get_object", Params={"Bucket": "hanzo-ml", "Key": "smoke/secret"})
    changed = signed[:-1] + ("0" if signed[-1] != "0" else "1")

    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(changed, timeout=20)

    assert refusal.value.code == 403
    assert urllib.request.urlopen(signed, timeout=20).read() == b"content"


def test_database_answers_in_the_cluster_network(cluster: Cluster) -> None:
    with psycopg.connect(cluster.postgres.create_database(unique("smoke"))) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_fake_nodes_pretend_to_run_pods(cluster: Cluster, namespace: str) -> None:
    name = unique("fake")
    cluster.add_fake_nodes(20)
    gang = job(name, namespace, ["nothing"], pods=20, gpus=8)
    pod = gang["spec"]["template"]["spec"]
    pod["tolerations"] = [{"key": FAKE, "operator": "Exists"}]
    pod["nodeSelector"] = {"type": "fake"}
    run_to_completion(cluster, gang)

    pods = cluster.get("pods", f"--namespace={namespace}", f"--selector=job-name={name}")["items"]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 20
    cluster.remove_fake_nodes()


@pytest.mark.cluster_slow
def test_killed_node_returns_under_its_name(cluster: Cluster, namespace: str) -> None:
    number = len(cluster.nodes)
    name = f"node-{number}"
    move_controllers(cluster, name)
    cluster.kill_node(name)
    cluster.kubectl("wait", f"node/{name}", "--for=condition=Ready=Unknown", "--timeout=60s")
    cluster.add_node(number)

    again = job(unique("again"), namespace, ["python", "-c", "import torch"], gpus=8)
    again["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": name}
    run_to_completion(cluster, again)


@pytest.mark.cluster_slow
@pytest.mark.parametrize("program", ["etcd", "apiserver", "controller-manager", "scheduler", "coredns"])
def test_control_plane_continues_after_crash(cluster: Cluster, namespace: str, program: str) -> None:
    cluster.control_plane.kill(program)
    cluster.control_plane.start(program)

    processes.wait_until(cluster.is_running, 60, lambda: f"the API server does not answer after {program}")
    run_to_completion(cluster, job(unique("after"), namespace, ["python", "-c", "pass"]))


@pytest.mark.cluster_slow
def test_kubelet_continues_after_crash(cluster: Cluster, namespace: str) -> None:
    first = next(iter(cluster.nodes.values()))
    first.kill_program("kubelet")
    first.start_program("kubelet")

    after = job(unique("after"), namespace, ["python", "-c", "pass"], gpus=8)
    after["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": first.name}
    run_to_completion(cluster, after)


def run_to_completion(cluster: Cluster, wanted: dict[str, Any]) -> None:
    cluster.apply(wanted)
    name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
    cluster.kubectl("wait", f"--namespace={namespace}", f"job/{name}", "--for=condition=Complete", "--timeout=180s")
