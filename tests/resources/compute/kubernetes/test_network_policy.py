"""NetworkPolicies: job pods reach required services only, and only pods of their own gang."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.contracts.job import BadConfiguration
from recipes.launch.pod import HEARTBEAT_PORT, RENDEZVOUS_PORT
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.network_policy import namespace_policy
from resources.settings.scheduler import Egress, Scheduler
from resources.settings.settings import Settings
from tests.resources.compute.kubernetes.jobs import BACKENDS, DISTRIBUTED, JOBS, a_job, of_kind
from tests.resources.compute.kubernetes.schemas import check

OWN = Scheduler(namespace_per_organization=True)
HANZO = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "hanzo"}}}
API = HANZO | {"podSelector": {"matchLabels": {"app": "hanzo-ml"}}}


def settings_of(folder: Path, text: str) -> Settings:
    file = folder / "config.yaml"
    file.write_text(text)
    return Settings.load({"HANZO_ML_HOME": str(folder), "HANZO_ML_CONFIG": str(file)})


def egress(policy: dict[str, Any]) -> list[tuple[Any, list[tuple[str, int]]]]:
    """Return each allowed egress peer with its ports."""
    return [
        (peer, [(port["protocol"], port["port"]) for port in rule.get("ports", ())])
        for rule in policy["spec"]["egress"]
        for peer in rule["to"]
    ]


DNS = (
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}},
    [("TCP", 53), ("UDP", 53)],
)


@pytest.mark.requirement("X2")
def test_pods_of_an_organization_reach_the_api_the_store_and_dns(tmp_path: Path) -> None:
    text = "storage: {endpoint: 'http://s3.hanzo.svc:7070'}\nscheduler: {namespace_per_organization: true}"
    policy = namespace_policy(settings_of(tmp_path, text), "hanzo-ml-acme")
    check(policy)
    spec = policy["spec"]
    assert spec["podSelector"] == {} and spec["ingress"] == [] and spec["policyTypes"] == ["Ingress", "Egress"]
    assert egress(policy) == [(API, [("TCP", 8057)]), (HANZO, [("TCP", 7070)]), DNS]


@pytest.mark.parametrize(
    ("endpoint", "peer", "port"),
    [
        ("http://10.89.0.1:7070", {"ipBlock": {"cidr": "10.89.0.1/32"}}, 7070),
        ("https://[fd00::1]", {"ipBlock": {"cidr": "fd00::1/128"}}, 443),
        ("http://minio:9000", {"podSelector": {}}, 9000),
        ("http://s3.hanzo.svc.cluster.local", HANZO, 80),
    ],
)
def test_store_is_found_by_its_endpoint(tmp_path: Path, endpoint: str, peer: Any, port: int) -> None:
    policy = namespace_policy(settings_of(tmp_path, f"storage: {{endpoint: '{endpoint}'}}"), "hanzo-ml")
    check(policy)
    assert (peer, [("TCP", port)]) in egress(policy)


def test_store_outside_the_cluster_needs_its_addresses_in_the_settings(tmp_path: Path) -> None:
    text = "storage: {endpoint: 'https://s3.eu-central-1.amazonaws.com'}\n"
    with pytest.raises(BadConfiguration, match=r"object store at s3\.eu-central-1.*set scheduler\.egress"):
        namespace_policy(settings_of(tmp_path, text), "hanzo-ml")
    given = text + "scheduler: {egress: [{cidr: 203.0.113.0/24, ports: [443]}]}"
    policy = namespace_policy(settings_of(tmp_path, given), "hanzo-ml")
    assert ({"ipBlock": {"cidr": "203.0.113.0/24"}}, [("TCP", 443), ("UDP", 443)]) in egress(policy)


def test_further_egress_names_addresses_or_pods(tmp_path: Path) -> None:
    rules = [{"namespace": "ceph", "pods": {"app": "rgw"}, "ports": [8080]}, {"cidr": "10.1.0.0/16"}]
    policy = namespace_policy(settings_of(tmp_path, yaml.safe_dump({"scheduler": {"egress": rules}})), "hanzo-ml")
    check(policy)
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ceph"}},
        "podSelector": {"matchLabels": {"app": "rgw"}},
    }
    assert (peer, [("TCP", 8080), ("UDP", 8080)]) in egress(policy)
    assert ({"ipBlock": {"cidr": "10.1.0.0/16"}}, []) in egress(policy)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either cidr or namespace"),
        ({"cidr": "10.0.0.0/8", "namespace": "ceph"}, "either cidr or namespace"),
        ({"cidr": "10.0.0.0/8", "pods": {"app": "rgw"}}, "within a namespace"),
        ({"cidr": "ten"}, "ten"),
        ({"cidr": "10.0.0.0/8", "ports": [70000]}, "65535"),
    ],
)
def test_egress_that_no_policy_can_express_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Egress.model_validate(given)


def test_pods_of_the_control_plane_in_the_same_namespace_are_not_restricted(tmp_path: Path) -> None:
    text = "scheduler: {namespace: hanzo}\ndagster: {run_pods: {namespace: hanzo}}"
    policy = namespace_policy(settings_of(tmp_path, text), "hanzo")
    assert policy["spec"]["podSelector"] == {"matchLabels": {"app": "hanzo-ml-job"}}


def test_gangs_reach_each_other_where_organizations_share_a_namespace(tmp_path: Path) -> None:
    policy = namespace_policy(settings_of(tmp_path, ""), "hanzo-ml")
    check(policy)
    jobs = {"podSelector": {"matchLabels": {"app": "hanzo-ml-job"}}}
    ports = {("TCP", HEARTBEAT_PORT), ("TCP", RENDEZVOUS_PORT), ("TCP", 32768)}
    assert [set(found) for peer, found in egress(policy) if peer == jobs] == [ports]
    assert [rule["from"] for rule in policy["spec"]["ingress"]] == [[jobs]]
    assert all(item["kind"] != "NetworkPolicy" for item in render(DISTRIBUTED, Scheduler()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gang_reaches_its_own_pods_only_where_organizations_have_namespaces(backend: str) -> None:
    scheduler = OWN.model_copy(update={"gang_backend": backend})
    items = render(DISTRIBUTED, scheduler, generation=2, namespace="hanzo-ml-acme")
    assert {item["metadata"]["namespace"] for item in items} == {"hanzo-ml-acme"}
    [policy] = [item for item in items if item["kind"] == "NetworkPolicy"]
    check(policy)
    spec = policy["spec"]
    pods = of_kind("JobSet" if backend != "indexed_job" else "Job", DISTRIBUTED, scheduler)["metadata"]["labels"]
    mine = spec["podSelector"]["matchLabels"]
    assert mine.items() <= pods.items()
    assert (
        [rule["to"] for rule in spec["egress"]]
        == [rule["from"] for rule in spec["ingress"]]
        == [[{"podSelector": spec["podSelector"]}]]
    )
    other = render(DISTRIBUTED.model_copy(update={"id": "f" * 32}), scheduler)[0]["metadata"]["labels"]
    assert not mine.items() <= other.items()


@pytest.mark.parametrize("name", ["one node", "two processes of one node", "a preparation in three pods"])
def test_job_whose_pods_need_no_other_has_no_policy(name: str) -> None:
    assert all(item["kind"] != "NetworkPolicy" for item in render(JOBS[name], OWN))


def test_rendered_job_is_in_the_namespace_of_the_settings_unless_another_is_given() -> None:
    assert {item["metadata"]["namespace"] for item in render(a_job(), OWN)} == {"hanzo-ml"}
