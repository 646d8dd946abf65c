"""Cluster check: missing requirements, each reported once with the command that fixes it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.pod_settings import VolumeClaim
from resources.compute.kubernetes.setup.check import check_facts, format_report
from resources.compute.kubernetes.setup.facts import API_VERSIONS, UNKNOWN, ClusterFacts
from resources.compute.kubernetes.setup.permissions import required_permissions
from resources.compute.kubernetes.setup.probe import probe_objects
from resources.compute.kubernetes.setup.queues import render_queues
from resources.settings.scheduler import Capacity, Scheduler
from tests.resources.compute.kubernetes.schemas import check

ROOT = Path(__file__).resolve().parents[5]
A100 = "nvidia-a100-80gb"
SCHEDULER = Scheduler(capacity={A100: Capacity(gpus=16, cpu=128, memory="1Ti")})


def node(name: str, gpus: int, gpu_type: str | None = A100) -> dict[str, Any]:
    labels = {"ml.hanzo.ai/gpu-type": gpu_type} if gpu_type else {}
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def healthy(scheduler: Scheduler = SCHEDULER) -> ClusterFacts:
    return ClusterFacts(
        version="v1.36.3",
        namespace_exists=True,
        missing_apis=(),
        denied=(),
        nodes=[node("a", 8), node("b", 8)],
        queues={(item["kind"], item["metadata"]["name"]): item for item in render_queues(scheduler)},
        secrets={},
        claims={},
        unreadable=(),
        refused="",
    )


def problems(facts: ClusterFacts, scheduler: Scheduler = SCHEDULER) -> list[tuple[str, str, str]]:
    found = check_facts(facts, scheduler)
    return [(each.subject, each.problem, each.mend) for each in found if each.problem]


def test_complete_cluster_has_no_finding() -> None:
    assert problems(healthy()) == []
    report = format_report("https://cluster", healthy(), check_facts(healthy(), SCHEDULER))
    assert "MISSING" not in report and report.startswith("Kubernetes v1.36.3 at https://cluster\n")
    assert len(report.splitlines()) < 24, "one screen"


def quota(gpus: str) -> dict[tuple[str, str], Any]:
    [found] = [item for item in render_queues(SCHEDULER) if item["kind"] == "ClusterQueue"]
    found["spec"]["resourceGroups"][0]["flavors"][0]["resources"][2]["nominalQuota"] = gpus
    return {**healthy().queues, ("ClusterQueue", "hanzo-ml"): found}


def inactive() -> dict[tuple[str, str], Any]:
    found = dict(healthy().queues[("LocalQueue", "hanzo-ml")] or {})
    found["status"] = {"conditions": [{"type": "Active", "status": "False", "message": "ClusterQueue is missing"}]}
    return {**healthy().queues, ("LocalQueue", "hanzo-ml"): found}


RENDER = "hanzo-ml cluster render | kubectl apply -f -"
LACKING: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "namespace": ({"namespace_exists": False}, "Namespace hanzo-ml", "does not exist", RENDER),
    "no GPU": ({"nodes": [node("a", 0)]}, "GPUs", "no node offers nvidia.com/gpu", "k8s-device-plugin"),
    "no label": (
        {"nodes": [node("a", 16), node("c", 8, None)]},
        "GPU type of c",
        "label ml.hanzo.ai/gpu-type is missing",
        "kubectl label node c ml.hanzo.ai/gpu-type=",
    ),
    "node away": ({"nodes": [node("a", 8)]}, f"GPUs {A100}", "the quota is 16, but nodes offer 8", "capacity"),
    "nodes denied": ({"nodes": None}, "nodes", "cannot be listed", RENDER),
    "other quota": (
        {"queues": quota("8")},
        "ClusterQueue hanzo-ml",
        "nvidia.com/gpu in flavor nvidia-a100-80gb is 8",
        RENDER,
    ),
    "inactive": ({"queues": inactive()}, "LocalQueue hanzo-ml", "is not active: ClusterQueue is missing", RENDER),
    "webhook": ({"refused": "failed calling webhook"}, "a job's objects", "failed calling webhook", "kubectl get pods -A"),
    "secret": ({"secrets": {"registry": False}}, "Secret registry", "does not exist in hanzo-ml", "create secret generic"),
    "no claim": ({"claims": {"data": ""}}, "claim data", "does not exist in hanzo-ml", "kubectl -n hanzo-ml apply -f"),
    "claim": ({"claims": {"data": "Pending"}}, "claim data", "is Pending", "describe persistentvolumeclaim data"),
}


@pytest.mark.parametrize("name", LACKING)
def test_missing_item_is_named_with_its_remedy(name: str) -> None:
    changed, subject, problem, mend = LACKING[name]
    [(found, words, command)] = problems(replace(healthy(), **changed))
    assert found == subject and problem in words and mend in command


def test_unreadable_items_are_reported_as_unknown() -> None:
    unknown = replace(
        healthy(), namespace_exists=True, claims={"data": UNKNOWN}, unreadable=("Namespace hanzo-ml", "claim data")
    )
    report = format_report("https://cluster", unknown, check_facts(unknown, SCHEDULER))
    ok = [line for line in report.splitlines() if line.startswith("ok")]
    assert not any("Namespace" in line or "claim" in line for line in ok)
    assert "unknown  Namespace hanzo-ml, claim data: this identity may not read them" in report


def test_missing_operators_are_named_instead_of_their_queues() -> None:
    bare = replace(healthy(), missing_apis=API_VERSIONS["kueue"], queues=dict.fromkeys(healthy().queues))
    found = problems(bare)
    assert [subject for subject, _, _ in found] == ["API jobset.x-k8s.io/v1alpha2", "API kueue.x-k8s.io/v1beta2"]
    assert all("kubectl apply --server-side -f https://github.com/kubernetes-sigs/" in mend for _, _, mend in found)


def test_queues_that_were_never_applied_are_all_missing() -> None:
    found = problems(replace(healthy(), queues=dict.fromkeys(healthy().queues)))
    assert {problem for _, problem, _ in found} == {"does not exist"} and len(found) == len(healthy().queues)
    bare = replace(healthy(), queues=dict.fromkeys(healthy().queues))
    report = format_report("https://cluster", bare, check_facts(bare, SCHEDULER))
    assert report.count(RENDER) == 1, "what one command mends is said once"


def test_equal_quotas_in_different_notation_are_equal() -> None:
    assert problems(replace(healthy(), queues=quota("16000m"))) == []


def test_denied_permissions_are_one_finding() -> None:
    needed = required_permissions(SCHEDULER)
    denied = tuple((each, verb) for each in needed for verb in each.verbs if each.resource in ("jobsets", "nodes"))
    [(subject, problem, _)] = problems(replace(healthy(), denied=denied))
    assert subject == "permissions"
    assert "list, watch nodes in all namespaces" in problem and "create, get, delete jobsets in hanzo-ml" in problem


def test_settings_that_name_no_capacity_are_a_finding_too() -> None:
    [(subject, problem, _)] = problems(replace(healthy(), nodes=[]), Scheduler())
    assert subject == "queues" and "scheduler.capacity is empty" in problem


def test_a_cluster_is_checked_for_the_gang_backend_of_the_settings() -> None:
    assert API_VERSIONS["indexed_job"] == ()
    for backend in ("coscheduling", "volcano"):
        assert len(API_VERSIONS[backend]) == 2
    scheduler = Scheduler(
        gang_backend="indexed_job", volumes=(VolumeClaim(claim="data", path="/data"),), rdma_resource="rdma/hca"
    )
    facts = replace(healthy(), queues={}, claims={"data": ""})
    found = {subject: problem for subject, problem, _ in problems(facts, scheduler)}
    assert "does not exist" in found["claim data"] and "would wait for ever" in found["RDMA rdma/hca"]


def test_command_without_a_cluster_names_the_setting_in_one_line(tmp_path: Path) -> None:

    def run_check(*options: str) -> subprocess.CompletedProcess[str]:
        run = [sys.executable, "-m", "resources.compute.kubernetes.setup.check", *options]
        env = {"HOME": str(tmp_path), "HANZO_ML_HOME": str(tmp_path / "home"), "PATH": ""}
        return subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    done = run_check()
    assert (done.returncode, done.stdout) == (1, "")
    assert "set scheduler.kubeconfig" in done.stderr and len(done.stderr.splitlines()) == 1
    config = tmp_path / "config"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\nusers: [{name: u, user: {}}]\n"
    )
    done = run_check("--kubeconfig", str(config))
    assert done.returncode == 1 and "the API server does not answer" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_probe_pods_are_valid_and_selected_by_the_network_policy() -> None:
    objects = probe_objects(Scheduler(gang_backend="indexed_job"))
    for item in objects:
        check(item)
    job = objects[-1]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)
    assert job["template"]["metadata"]["labels"]["app"] == "hanzo-ml-job"
    assert job["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    compile(job["template"]["spec"]["containers"][0]["command"][2], "probe", "exec")
