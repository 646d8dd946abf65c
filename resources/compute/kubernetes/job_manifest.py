"""Render a job's Kubernetes objects: JobSet behind Kueue, or Indexed Job, as YAML."""

from typing import Any
from urllib.parse import urlparse

import yaml

from recipes.contracts.exit_reason import EXIT_ERROR
from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED, Job
from resources.compute.kubernetes.gang import Gang, labels, plan_gang
from resources.compute.kubernetes.pod_manifest import CONTAINER, job_document, metadata, pod_template
from resources.compute.kubernetes.token_secret import token_secret
from resources.settings.sections import Scheduler

# An Indexed Job: one pod for each node, by rank. The child of a JobSet, and alone what a cluster without CRDs can do.
#
# Alone it is not a gang: the scheduler may start some of its pods, and nothing but whoever follows it can restart all of
# them. So it fails as soon as one pod does; only a job of a single pod restarts by itself (facts/kubernetes.md, pitfall
# 2), and one whose pods find in the store what they need of each other.

FINAL_EXIT_CODES = [EXIT_ERROR, EXIT_BAD_CONFIGURATION]
"""Exit codes that no restart would change. In ascending order: else the API server refuses the child of a JobSet."""
FINAL_RULE, DISRUPTION_RULE, PREEMPTED_RULE = 0, 1, 2
"""Places of the rules below; the message of a failed Job names the place of the rule that failed it."""
MAX_JOB_RESTARTS = 100_000
"""The controller enforces the limit of counted attempts, which JobSet cannot tell from others: its own is never reached."""


def job_spec(gang: Gang, rank_0: str, subdomain: str | None = None, *, alone: bool = False) -> dict[str, Any]:
    """The `spec` of a batch/v1 Job."""
    by_itself = alone and (gang.nodes == 1 or gang.shares)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": gang.nodes,
        "parallelism": gang.nodes,
        "backoffLimit": MAX_JOB_RESTARTS if by_itself else 0,
        "podFailurePolicy": pod_failure_policy("Ignore" if by_itself else "FailJob"),
        "template": pod_template(gang, rank_0, subdomain),
    }
    if alone:
        # Without Kueue nobody counts over restarts. This clock starts again with each of them.
        spec["activeDeadlineSeconds"] = gang.max_seconds
    return spec


def pod_failure_policy(interrupted: str) -> dict[str, Any]:
    """Final errors fail the Job, whatever else; `interrupted` is the action for evicted pods and those that saved."""
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": exit_codes(FINAL_EXIT_CODES)},
            {"action": interrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": interrupted, "onExitCodes": exit_codes([EXIT_PREEMPTED])},
        ]
    }


def exit_codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": values}


def without_crds(gang: Gang) -> list[dict[str, Any]]:
    """The Service that gives the pods host names, where they look for each other; then the Job."""
    named = gang.nodes > 1 and not gang.shares
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(gang),
        "spec": job_spec(gang, f"{gang.name}-0.{gang.name}", gang.name if named else None, alone=True),
    }
    return [headless_service(gang), job] if named else [job]


def headless_service(gang: Gang) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(gang),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": gang.name},
            "publishNotReadyAddresses": True,  # ranks look for each other before any of them is ready
        },
    }


# A JobSet behind Kueue: admitted whole or not at all, preempted whole, restarted whole (rows H3, J3, J7; facts).

NODES = "node"
"""The one replicated job. Its pods are NAME-node-0-RANK, reachable below the JobSet's own name."""


def job_set(gang: Gang) -> dict[str, Any]:
    rank_0 = f"{gang.name}-{NODES}-0-0.{gang.name}"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(gang, **kueue_labels(gang)),
        "spec": {
            # Kueue starts it on admission, and suspends it again when it is preempted.
            "suspend": True,
            "network": {"enableDNSHostnames": True, "subdomain": gang.name, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(),
            "replicatedJobs": [
                {
                    "name": NODES,
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels(gang.job)}, "spec": job_spec(gang, rank_0)},
                }
            ],
        },
    }


def kueue_labels(gang: Gang) -> dict[str, str]:
    return {
        "kueue.x-k8s.io/queue-name": gang.queue,
        "kueue.x-k8s.io/priority-class": gang.priority_class,
        # Kueue's clock adds up over preemptions; the Job's own would start again with each.
        "kueue.x-k8s.io/max-exec-time-seconds": str(gang.max_seconds),
    }


def failure_policy() -> dict[str, Any]:
    """Final errors fail the job at once; anything else restarts the whole gang, for interruptions without counting it."""
    return {
        "maxRestarts": MAX_JOB_RESTARTS,
        "rules": [
            rule("finalError", "FailJobSet", FINAL_RULE),
            rule("disruption", "RestartJobSetAndIgnoreMaxRestarts", DISRUPTION_RULE),
            rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", PREEMPTED_RULE),
        ],
    }


def rule(name: str, action: str, place: int) -> dict[str, Any]:
    """What follows when the child's own rule at `place` failed it.

    Both have the reason PodFailurePolicy; only the message tells them apart (a key of JobSet 0.10 and newer).
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"matching FailJob rule at index {place}$"],
    }


# `render`: the objects of a job in the order in which they are applied; `to_yaml` writes them for people and kubectl.

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts that name the pod itself when a pod asks for them."""


def render(job: Job, scheduler: Scheduler, generation: int = 1, used_seconds: float = 0) -> list[dict[str, Any]]:
    """What is created for a job: exactly this, but for the token in its Secret, which is made then and never printed.

    Raises:
        BadConfiguration: the job asks for hardware that the settings do not know or that cannot be written down.
    """
    gang = plan_gang(job, scheduler, generation, used_seconds)
    runs = [job_set(gang)] if scheduler.gang_backend == "kueue" else without_crds(gang)
    return [job_document(gang), token_secret(gang), *runs]


def out_of_reach(job: Job, scheduler: Scheduler) -> list[str]:
    """What a pod of this job could not reach with these settings, each with what to set."""
    job = plan_gang(job, scheduler).job
    found = []
    if urlparse(job.store.root).scheme == "file":
        found.append(f"the object store {job.store.root}, a folder of this machine (set storage.endpoint)")
    if job.tracking is not None and urlparse(job.tracking.uri).hostname in LOOPBACK:
        found.append(f"the tracking server {job.tracking.uri}, which there is the pod itself (set scheduler.tracking_uri)")
    return found


class _Dumper(yaml.SafeDumper):
    """Texts of many lines as they are, and every object written out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """One YAML document for each object, keys in the order in which they were made."""
    return "".join("---\n" + yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=1000) for item in objects)
