"""Start two pods like a job's, and check their image and network connections."""

import time
from typing import Any

from recipes.contracts.job import Distributed
from recipes.launch.pod import RENDEZVOUS_PORT
from resources.compute.kubernetes.cluster import POD, AlreadyExists, Cluster, InvalidObject, Item, RequestDenied
from resources.compute.kubernetes.gang import JOB_LABEL
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.setup.facts import sample_job
from resources.compute.kubernetes.states import PULL_REASONS, PodState, read_pod
from resources.compute.kubernetes.submission import delete_rest
from resources.settings.scheduler import Scheduler

PROBE_SECONDS = 300.0
"""Includes pulling the image, which may be large."""
PULL_SECONDS = 20.0
"""Time after which a failed image pull is final: the kubelet has tried more than once."""
POLL_SECONDS = 1.0
SCRIPT = f"""
import importlib.util, os, socket, sys, time, urllib.request
problems = []
if importlib.util.find_spec("recipes.launcher") is None:
    problems.append("the image lacks Hanzo ML: add `RUN pip install hanzo-ml` to its Containerfile")
try:
    urllib.request.urlopen(os.environ["HANZO_ML_API"] + "/alive", timeout=10).close()
except OSError as error:
    problems.append(f"no pod can reach the API at {{os.environ['HANZO_ML_API']}}: {{error}}")
host, port, end = os.environ["HANZO_ML_RANK_0"], {RENDEZVOUS_PORT}, time.monotonic() + 120
if os.environ["NODE_RANK"] == "0":
    listener = socket.create_server(("", port))
    listener.settimeout(120)
    try:
        listener.accept()
    except OSError as error:
        problems.append(f"pods cannot reach each other on port {{port}}: {{error}}")
else:
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                problems.append(f"pods cannot reach each other at {{host}}:{{port}}: {{error}}")
                break
            time.sleep(1)
if problems:
    sys.exit("; ".join(problems))
"""


def probe_pods(cluster: Cluster, scheduler: Scheduler) -> tuple[str, str]:
    """Run two pods; return the problem and a command that fixes it.

    Both are empty if there is no problem. All objects are deleted afterwards.

    Raises:
        ClusterError: the API server does not answer.
    """
    plain = scheduler.model_copy(update={"gang_backend": "indexed_job"})
    objects = probe_objects(plain)
    config_map = objects[0]
    try:
        for item in objects:
            cluster.create(item)
        return wait_for_pods(cluster, config_map, scheduler)
    except AlreadyExists:
        return "the objects of an earlier check are still there", "hanzo-ml cluster check --pods    # in a moment"
    except (InvalidObject, RequestDenied) as refusal:
        return f"the API server refuses the pods: {refusal}", "hanzo-ml cluster check    # names what is missing"
    finally:
        delete_rest(cluster, config_map, plain)


def probe_objects(scheduler: Scheduler) -> list[Item]:
    """Return a job of two pods that run the script, on two nodes if possible."""
    job = sample_job().model_copy(
        update={"id": "check-pods", "distributed": Distributed(num_nodes=2, gpus_per_node=1, backend="gloo")}
    )
    objects = render(job, scheduler)
    template = objects[-1]["spec"]["template"]
    template["spec"]["containers"][0]["command"] = ["python", "-c", SCRIPT]
    template["spec"]["terminationGracePeriodSeconds"] = 1
    apart: dict[str, Any] = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {JOB_LABEL: template["metadata"]["labels"][JOB_LABEL]}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": apart}]
    template["spec"]["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return objects


def wait_for_pods(cluster: Cluster, config_map: Item, scheduler: Scheduler) -> tuple[str, str]:
    namespace = scheduler.namespace
    selector = f"{JOB_LABEL}={config_map['metadata']['labels'][JOB_LABEL]}"
    mend = f"kubectl -n {namespace} get events,networkpolicies"
    begun = time.monotonic()
    while True:
        pods = [read_pod(item) for item in cluster.list(POD, namespace, labelSelector=selector)[0]]
        waited = time.monotonic() - begun
        if waited > PULL_SECONDS and (without := [pod for pod in pods if pod.waiting in PULL_REASONS]):
            return (
                f"image {without[0].image} cannot be pulled: {without[0].message}",
                "hanzo-ml config show    # set scheduler.default_image, or scheduler.image_pull_secrets, in config.yaml",
            )
        if failed := [pod for pod in pods if pod.has_ended and pod.exit_code != 0]:
            return "; ".join(dict.fromkeys(describe_pod(pod) for pod in failed)), mend
        if len([pod for pod in pods if pod.has_ended]) == 2:
            return "", ""
        if waited > PROBE_SECONDS:
            waiting = [describe_pod(pod) for pod in pods if not pod.has_ended]
            return "; ".join(dict.fromkeys(waiting)) or "no pod was created", mend
        time.sleep(POLL_SECONDS)


def describe_pod(pod: PodState) -> str:
    return pod.message or pod.unschedulable or pod.waiting or f"{pod.name} is {pod.phase.lower()} on {pod.node or 'no node'}"
