"""Objects as JobSet, Kueue, the kubelet and the node controller write them."""

import copy
from typing import Any

from tests.resources.compute.kubernetes.api_server import ApiServer, Item, timestamp

CONTAINER = "program"


def condition(type: str, message: str = "", *, status: str = "True", reason: str = "Because") -> Item:
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": timestamp()}


def node(name: str, ready: str = "True") -> Item:
    status = {"conditions": [condition("Ready", status=ready)]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status}


class Gang:
    """Simulate the cluster's controllers for one JobSet on an `ApiServer`."""

    def __init__(self, server: ApiServer, job_set: Item) -> None:
        self.server = server
        self.job_set = job_set
        self.pods: dict[int, Item] = {}
        self._starts = 0

    def set_workload(self, *conditions: Item, created: str | None = None, priority: int = 0) -> None:
        metadata = self.job_set["metadata"]
        self.server.put(
            {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": {
                    "name": f"jobset-{metadata['name']}",
                    "namespace": metadata["namespace"],
                    "uid": f"workload-of-{metadata['uid']}",
                    "creationTimestamp": created or timestamp(),
                    "ownerReferences": [{"kind": "JobSet", "uid": metadata["uid"]}],
                },
                "spec": {"queueName": "hanzo-ml", "priority": priority},
                "status": {"conditions": list(conditions)},
            }
        )

    def wait_for_quota(self, words: str) -> None:
        self.set_workload(condition("QuotaReserved", words, status="False", reason="Pending"))

    def admit(self) -> None:
        self.set_workload(condition("QuotaReserved"), condition("Admitted"))
        self.change(suspend=False)

    def suspend(self, words: str) -> None:
        """Preempt the gang: suspend its JobSet and remove its pods."""
        self.set_workload(
            condition("Evicted", words, reason="Preempted"),
            condition("QuotaReserved", "8 more needed", status="False", reason="Pending"),
        )
        self.change(suspend=True)
        self.delete_pods()

    def change(self, *conditions: Item, **spec: Any) -> None:
        """Set conditions of the JobSet and fields of its spec."""
        self.job_set["spec"] |= spec
        self.job_set["status"] = {"conditions": list(conditions)}
        self.server.put(self.job_set)

    def start(self, nodes: int = 1, *, running: bool = True, owner: str | None = None) -> str:
        """Create one pod per node and return the uid of the first.

        They belong to a new Job unless `owner` names one.
        """
        self._starts += 1
        template = self.job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        for rank in range(nodes):
            metadata = copy.deepcopy(template["metadata"])
            metadata["annotations"]["batch.kubernetes.io/job-completion-index"] = str(rank)
            metadata["ownerReferences"] = [{"kind": "Job", "uid": owner or f"child-{self._starts}"}]
            name, namespace = self.job_set["metadata"]["name"], self.job_set["metadata"]["namespace"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**metadata, "name": f"{name}-node-0-{rank}-{self._starts}", "namespace": namespace},
                "spec": {**template["spec"], "nodeName": f"node-{rank}"},
                "status": {"phase": "Pending", "conditions": [condition("PodScheduled")]},
            }
            self.pods[rank] = self.server.put(pod, "ADDED")
            if running:
                self.set_container(rank, {"running": {"startedAt": timestamp()}})
            else:
                self.set_container(rank, {"waiting": {"reason": "ContainerCreating"}})
        uid: str = self.pods[0]["metadata"]["uid"]
        return uid

    def set_container(self, rank: int, state: Item, phase: str | None = None, **status: Any) -> None:
        pod = self.pods[rank]
        pod["status"] |= {"containerStatuses": [{"name": CONTAINER, "state": state}], **status}
        pod["status"]["phase"] = phase or ("Running" if "running" in state else "Pending")
        self.server.put(pod)

    def end(self, rank: int, code: int, reason: str = "Error", message: str = "", **status: Any) -> None:
        terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": timestamp()}
        self.set_container(rank, {"terminated": terminated}, "Succeeded" if code == 0 else "Failed", **status)

    def mark_deleted(self, rank: int, later: int = 0) -> None:
        """Mark a pod without a node as failed and deleted, as the cluster does."""
        pod = self.pods[rank]
        pod["status"]["phase"] = "Failed"
        pod["metadata"]["deletionTimestamp"] = timestamp(later)
        self.server.put(pod)

    def delete_pods(self) -> None:
        for pod in self.pods.values():
            self.server.remove(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}")
        self.pods = {}

    def warn(self, about: str, message: str, reason: str = "Failed") -> None:
        self.server.put(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"event-{self.server.version}", "namespace": self.job_set["metadata"]["namespace"]},
                "type": "Warning",
                "involvedObject": {"name": about},
                "reason": reason,
                "message": message,
                "lastTimestamp": timestamp(),
            }
        )
