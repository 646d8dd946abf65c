"""`hanzo-ml cluster check`: report missing prerequisites with the commands that fix them."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.cluster import Cluster, ClusterError, Item, RequestDenied, open_cluster
from resources.compute.kubernetes.setup.facts import UNKNOWN, ClusterFacts, FactReader, gpu_count
from resources.compute.kubernetes.setup.kubeconfig import find_kubeconfig
from resources.compute.kubernetes.setup.permissions import SERVICE_ACCOUNT
from resources.compute.kubernetes.setup.probe import probe_pods
from resources.compute.kubernetes.setup.queues import GPU, render_queues
from resources.compute.kubernetes.setup.tenants import find_missing, list_tenants
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.scheduler import CPU_FLAVOR, Scheduler
from resources.settings.settings import Settings

RENDER = "hanzo-ml cluster render | kubectl apply -f -"
SET = f"hanzo-ml config show    # set it in config.yaml, then: {RENDER}"
INSTALL = {
    "jobset.x-k8s.io/v1alpha2": "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/jobset/releases/download/v0.12.0/manifests.yaml",
    "kueue.x-k8s.io/v1beta2": "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/kueue/releases/download/v0.19.2/manifests.yaml",
    "scheduling.volcano.sh/v1beta1": "kubectl apply -f "
    "https://raw.githubusercontent.com/volcano-sh/volcano/v1.15.1/installer/volcano-development.yaml",
    "scheduling.x-k8s.io/v1alpha1": "helm install scheduler-plugins scheduler-plugins "
    "--repo https://scheduler-plugins.sigs.k8s.io --namespace scheduler-plugins --create-namespace",
}
DEVICE_PLUGIN = (
    "https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/v0.17.1/deployments/static/nvidia-device-plugin.yml"
)


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    `problem` is empty if it passed, `mend` is the command that fixes it.
    """

    subject: str
    problem: str = ""
    mend: str = ""


def check_facts(facts: ClusterFacts, scheduler: Scheduler) -> list[Finding]:
    """Return the results of all checks, in the order in which to fix them."""
    return [
        *check_namespace(facts, scheduler),
        *check_apis(facts),
        *check_permissions(facts, scheduler),
        *check_queues(facts, scheduler),
        *check_nodes(facts, scheduler),
        *check_references(facts, scheduler),
        *check_objects(facts),
    ]


def check_namespace(facts: ClusterFacts, scheduler: Scheduler) -> Iterator[Finding]:
    subject = f"Namespace {scheduler.namespace}"
    if subject not in facts.unreadable:
        yield Finding(subject, "" if facts.namespace_exists else "does not exist", RENDER)


def check_apis(facts: ClusterFacts) -> Iterator[Finding]:
    for each in facts.missing_apis:
        yield Finding(f"API {each}", "is not installed", INSTALL[each])
    if not facts.missing_apis:
        yield Finding("APIs of the gang backend")


def check_permissions(facts: ClusterFacts, scheduler: Scheduler) -> Iterator[Finding]:
    """Check the permissions of the caller.

    Run the check as the control plane's service account to see that account's permissions.
    """
    lacking: dict[str, list[str]] = {}
    for permission, verb in facts.denied:
        place = "in all namespaces" if permission.cluster_wide else f"in {scheduler.namespace}"
        lacking.setdefault(f"{permission.resource} {place}", []).append(verb)
    words = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in lacking.items())
    mend = f"{RENDER}    # then run this check as the service account {SERVICE_ACCOUNT}"
    yield Finding("permissions", words and f"denied: {words}", mend)


def check_queues(facts: ClusterFacts, scheduler: Scheduler) -> Iterator[Finding]:
    try:
        wanted = render_queues(scheduler)
    except BadConfiguration as problem:
        yield Finding("queues", str(problem), SET)
        return
    if facts.missing_apis:
        return  # without its API there is no queue either
    for item in wanted:
        kind, name = item["kind"], item["metadata"]["name"]
        found = facts.queues.get((kind, name))
        if found == {}:
            continue  # this identity may not read it
        yield Finding(f"{kind} {name}", describe_queue_problem(item, found), RENDER)


def describe_queue_problem(wanted: Item, found: Item | None) -> str:
    if found is None:
        return "does not exist"
    conditions = found.get("status", {}).get("conditions") or ()
    if inactive := next((each for each in conditions if each["type"] == "Active" and each["status"] == "False"), None):
        return f"is not active: {inactive.get('message', '')}"
    if wanted["kind"] == "ClusterQueue" and (other := differing_quotas(wanted, found)):
        return f"has another quota than scheduler.capacity: {'; '.join(other)}"
    if "value" in wanted and wanted["value"] != found.get("value"):
        return f"has the value {found.get('value')}, expected {wanted['value']}"
    return ""


def differing_quotas(wanted: Item, found: Item) -> list[str]:
    expected, actual = read_quotas(wanted), read_quotas(found)
    return [
        f"{resource} in flavor {flavor} is {actual.get((flavor, resource), 'missing')}, expected {amount}"
        for (flavor, resource), amount in expected.items()
        if parse_quantity(actual.get((flavor, resource))) != parse_quantity(amount)
    ]


def read_quotas(cluster_queue: Item) -> dict[tuple[str, str], str]:
    return {
        (flavor["name"], resource["name"]): str(resource["nominalQuota"])
        for group in cluster_queue["spec"].get("resourceGroups") or ()
        for flavor in group["flavors"]
        for resource in flavor["resources"]
    }


def parse_quantity(text: str | None) -> Any:
    from kubernetes.utils import parse_quantity as parse

    return None if text is None else parse(text)


def check_nodes(facts: ClusterFacts, scheduler: Scheduler) -> Iterator[Finding]:
    """Compare the GPUs of nodes, by the label that jobs select, with the quota."""
    if facts.nodes is None:
        yield Finding("nodes", "cannot be listed by this identity", RENDER)
        return
    with_gpus = [node for node in facts.nodes if gpu_count(node, GPU)]
    wanted = {name: each.gpus for name, each in scheduler.capacity.items() if name != CPU_FLAVOR and each.gpus}
    if wanted and not with_gpus:
        yield Finding("GPUs", f"no node offers {GPU}", f"kubectl apply -f {DEVICE_PLUGIN}")
        return
    label = scheduler.gpu_type_label
    unlabelled = [node for node in with_gpus if node["metadata"].get("labels", {}).get(label) not in scheduler.gpu_types]
    if unlabelled:
        names = [str(node["metadata"]["name"]) for node in unlabelled]
        mend = f"kubectl label node {' '.join(names)} {label}=TYPE    # one of {', '.join(scheduler.gpu_types)}"
        yield Finding(f"GPU type of {', '.join(names)}", f"is unknown: label {label} is missing or another", mend)
    for gpu_type, quota in wanted.items():
        yield Finding(f"GPUs {gpu_type}", *compare_quota(gpu_type, quota, with_gpus, scheduler))
    if scheduler.rdma_resource and not any(gpu_count(node, scheduler.rdma_resource) for node in facts.nodes):
        problem = "no node offers it: jobs on several nodes with rdma auto or enabled would wait for ever"
        yield Finding(f"RDMA {scheduler.rdma_resource}", problem, "kubectl get nodes -o yaml | grep -A20 allocatable")


def compare_quota(gpu_type: str, quota: int, nodes: Sequence[Item], scheduler: Scheduler) -> tuple[str, str]:
    labelled = [node for node in nodes if node["metadata"].get("labels", {}).get(scheduler.gpu_type_label) == gpu_type]
    offered = sum(gpu_count(node, GPU) for node in labelled)
    if offered >= quota:
        return "", ""
    problem = f"the quota is {quota}, but nodes offer {offered}: jobs would be admitted without being able to start"
    return (
        problem,
        f"kubectl get nodes -L {scheduler.gpu_type_label}    # or set scheduler.capacity.{gpu_type}.gpus: {offered}",
    )


def check_references(facts: ClusterFacts, scheduler: Scheduler) -> Iterator[Finding]:
    namespace = scheduler.namespace
    for name, exists in facts.secrets.items():
        mend = f"kubectl -n {namespace} create secret docker-registry {name} --docker-server=HOST --docker-username=USER"
        if name not in scheduler.image_pull_secrets:
            mend = f"kubectl -n {namespace} create secret generic {name} --from-literal=KEY=VALUE"
        yield Finding(f"Secret {name}", "" if exists else f"does not exist in {namespace}", mend)
    for name, phase in facts.claims.items():
        mend = f"kubectl -n {namespace} describe persistentvolumeclaim {name}    # why no volume is bound to it"
        if not phase:
            mend = f"kubectl -n {namespace} apply -f FILE    # with a PersistentVolumeClaim of this name"
        if phase != UNKNOWN:
            problem = "" if phase == "Bound" else f"is {phase}" if phase else f"does not exist in {namespace}"
            yield Finding(f"claim {name}", problem, mend)


def check_objects(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.missing_apis or facts.denied or not facts.namespace_exists:
        return  # not checked, or the missing parts explain the refusal
    mend = "kubectl get pods -A | grep -v Running    # a controller whose webhook does not answer?"
    yield Finding("a job's objects", facts.refused and f"the API server refuses them: {facts.refused}", mend)


def check_tenants(cluster: Cluster, settings: Settings) -> Iterator[Finding]:
    """Check namespaces of organizations that have one, or a quota in the settings.

    Raises:
        ClusterError: the API server does not answer.
    """
    known: list[str] = []
    if settings.scheduler.namespace_per_organization:
        try:
            known = [*list_tenants(cluster, settings), *settings.scheduler.quotas]
        except RequestDenied:  # use only those in the settings
            known = [*settings.scheduler.quotas]
    for organization in dict.fromkeys((DEFAULT_ORGANIZATION, *known)):
        try:
            missing = find_missing(cluster, settings, organization)
        except BadConfiguration as refusal:
            yield Finding(
                "network policies", str(refusal), "hanzo-ml config show    # set it in config.yaml, then: " + RENDER
            )
            return
        mend = RENDER if organization == DEFAULT_ORGANIZATION else shlex.join(["hanzo-ml", "tenant", "apply", organization])
        problem = f"its namespace lacks {', '.join(missing)}" if missing else ""
        yield Finding(f"organization {organization}", problem, mend)


def format_report(address: str, facts: ClusterFacts, findings: Sequence[Finding]) -> str:
    problems = [finding for finding in findings if finding.problem]
    lines = [f"Kubernetes {facts.version} at {address}"]
    lines += [f"ok       {finding.subject}" for finding in findings if not finding.problem]
    for problem, mend in dict.fromkeys((finding.problem, finding.mend) for finding in problems):
        subjects = [each.subject for each in problems if (each.problem, each.mend) == (problem, mend)]
        lines += [f"MISSING  {', '.join(subjects)}: {problem}", f"           {mend}"]
    if facts.unreadable:
        lines.append(f"unknown  {', '.join(facts.unreadable)}: this identity may not read them")
    return "\n".join(lines)


def check_cluster(cluster: Cluster, scheduler: Scheduler) -> tuple[ClusterFacts, list[Finding]]:
    """Read the facts of a cluster and check them.

    Raises:
        ClusterError: the API server does not answer.
    """
    try:
        wanted = render_queues(scheduler)
    except BadConfiguration:
        wanted = []  # reported by the check
    facts = FactReader(cluster, scheduler).read(wanted)
    return facts, check_facts(facts, scheduler)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig")
    parser.add_argument("--pods", action="store_true")
    options = parser.parse_args()
    try:
        settings = Settings.load()
        scheduler = settings.scheduler
        cluster = open_cluster(find_kubeconfig(options.kubeconfig, scheduler))
        facts, findings = check_cluster(cluster, scheduler)
        findings += check_tenants(cluster, settings)
        if options.pods:
            findings.append(Finding("two pods that connect", *probe_pods(cluster, scheduler)))
    except (BadConfiguration, ClusterError) as problem:
        sys.exit(f"error: {problem}")
    print(format_report(cluster.address, facts, findings))
    sys.exit(any(finding.problem for finding in findings))


if __name__ == "__main__":
    main()
