"""Two organizations on one cluster are isolated in network, API and object store."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from recipes.contracts.exit_reason import ExitReason
from resources.compute.base import JobRef, Phase
from tests.cluster.cluster import Cluster
from tests.cluster.installation import ENDS_WITHIN, wait_until
from tests.cluster.signed_in_installation import environment_of
from tests.cluster.storage import POSTGRES_PORT
from tests.cluster.tenant_installation import LISTENER_PORT, Target, TenantInstallation, outside_address

pytestmark = [pytest.mark.cluster, pytest.mark.install_slow]

MAX_OBJECTS = 3
ACME, RIVAL = "Acme Inc", "rival"
SHOW_ENVIRONMENT = """
import json, os
account = os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount")
print(json.dumps({"variables": dict(os.environ), "account": account}))
"""
SECRET_OF_ACME = "acme's loss is 0.25"
STAY = "import time\nprint('runs', flush=True)\nwhile True: time.sleep(1)"
GANG = """
import os, socket, time
place = (os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"]))
if os.environ["NODE_RANK"] == "0":
    with socket.create_server(("", place[1])) as server:
        server.settimeout(120)
        print("met", server.accept()[1][0])
else:
    for _ in range(120):
        try:
            socket.create_connection(place, timeout=5).close()
            break
        except OSError:
            time.sleep(1)
    else:
        raise SystemExit("rank 0 does not answer")
"""
TOO_MANY_GPUS = {"gpus": 3, "memory": "256Mi"}


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantInstallation]:
    scheduler = {"max_objects": MAX_OBJECTS, "quotas": {RIVAL: {"max_concurrent_jobs": 20}}}
    folder = tmp_path_factory.mktemp("installation")
    with TenantInstallation(cluster, "tenants", folder, scheduler) as installation, environment_of(installation):
        yield installation


@pytest.fixture(scope="module")
def waiting(installation: TenantInstallation) -> JobRef:
    """Submit a job of an organization that was not prepared."""
    return installation.submit(ACME, SHOW_ENVIRONMENT + f"print({SECRET_OF_ACME!r})")


def test_job_waits_until_its_organization_is_prepared(installation: TenantInstallation, waiting: JobRef) -> None:
    detail = installation.wait_for_detail(ACME, waiting, "is not prepared")
    assert "`hanzo-ml tenant apply 'Acme Inc'`" in detail and installation.observe(waiting).phase is Phase.PENDING
    assert "Namespace" in installation.apply_tenant(ACME)
    ended = installation.wait_for(waiting, Phase.SUCCEEDED)
    assert ended.reason is ExitReason.COMPLETED and installation.jobs.get(waiting).namespace == installation.namespace(ACME)


def test_check_names_organizations_that_are_not_prepared(installation: TenantInstallation) -> None:
    done = check(installation)
    assert "hanzo-ml tenant apply rival" in done and "organization default" in done.partition("MISSING")[0]
    installation.apply_tenant(RIVAL)
    assert "tenant apply" not in check(installation)
    assert installation.tenant("list").split("\n")[:2] == [
        f"{ACME} {installation.namespace(ACME)}",
        f"{RIVAL} {installation.namespace(RIVAL)}",
    ]


def check(installation: TenantInstallation) -> str:
    done = installation.run_cli("cluster", "check", "--kubeconfig", str(installation.cluster.kubeconfig))
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def prepared(installation: TenantInstallation, waiting: JobRef) -> TenantInstallation:
    for organization in (ACME, RIVAL):
        installation.apply_tenant(organization)
    installation.wait_for(waiting, Phase.SUCCEEDED)
    return installation


def test_pods_hold_one_token_and_no_other_secret(prepared: TenantInstallation, waiting: JobRef) -> None:
    [line] = [line for line in prepared.log_text(waiting).splitlines() if line.startswith('{"variables"')]
    seen = json.loads(line)
    assert seen["account"] is False
    variables: dict[str, str] = seen["variables"]
    secrets = {str(prepared.settings.database_url), *prepared.settings.storage.variables.values(), prepared.token}
    assert not [name for name, value in variables.items() if value in secrets]
    assert not [name for name in variables if name.startswith(("AWS_", "HANZO_ML_DATABASE"))]
    assert variables["MLFLOW_TRACKING_TOKEN"]


@pytest.mark.requirement("X2")
def test_network_policy_blocks_all_but_the_needed_addresses(prepared: TenantInstallation) -> None:
    rival, neighbour = prepared.listen(RIVAL), prepared.listen(ACME)
    address = prepared.cluster.address
    with outside_address() as outside:
        forbidden: dict[str, Target] = {
            "another organization's pod": (rival, LISTENER_PORT),
            "another job's pod": (neighbour, LISTENER_PORT),
            "database": (address, POSTGRES_PORT),
            "outside address": outside,
            "API server": (address, 6443),
        }
        needed: dict[str, Target] = {"API": (address, prepared.port), "store": store_of(prepared), "DNS": (address, 53)}
        targets = {**forbidden, **needed}
        prepared.delete_policies(ACME, RIVAL)
        before = dict.fromkeys(targets, True)
        assert prepared.probe(ACME, targets, before) == before
        prepared.apply_tenant(ACME)
        after = dict.fromkeys(forbidden, False) | dict.fromkeys(needed, True)
        assert prepared.probe(ACME, targets, after) == after
        prepared.apply_tenant(RIVAL)
        prepared.delete_policies(ACME)
        protected = before | {"another organization's pod": False}
        assert prepared.probe(ACME, targets, protected) == protected, "the other one's own policy is enough"
        prepared.apply_tenant(ACME)


def store_of(installation: TenantInstallation) -> Target:
    url = httpx.URL(str(installation.settings.storage.endpoint))
    return str(url.host), int(url.port or 80)


def test_pods_of_a_gang_reach_each_other(prepared: TenantInstallation) -> None:
    shape = {"num_nodes": 2, "gpus_per_node": 1, "backend": "gloo"}
    job = prepared.submit(ACME, GANG, distributed=shape)
    prepared.wait_for(job, Phase.SUCCEEDED)
    assert "met 10.91." in prepared.log_text(job)
    namespace = f"--namespace={prepared.namespace(ACME)}"
    wait_until(lambda: len(prepared.cluster.get("networkpolicies", namespace)["items"]) == 1, 60, lambda: "it is left")


@pytest.mark.requirement("A11", "Z12")
def test_jobs_of_both_organizations_run(prepared: TenantInstallation) -> None:
    jobs = [prepared.submit(organization, "print('hello')") for organization in (ACME, RIVAL)]
    for job in jobs:
        prepared.wait_for(job, Phase.SUCCEEDED)
    assert {prepared.jobs.get(job).namespace for job in jobs} == {prepared.namespace(ACME), prepared.namespace(RIVAL)}


def requests_about(job: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return requests about a job and its run, over all routes that name one."""
    run = {"run_id": job}
    objects = f"/v1/jobs/{job}/programs/command/objects"
    return [
        ("GET", f"/v1/jobs/{job}", {}),
        ("GET", f"/v1/jobs/{job}/logs", {}),
        ("GET", f"/v1/jobs/{job}/logs?follow=false", {}),
        ("POST", f"/v1/jobs/{job}/cancel", {}),
        ("POST", f"/v1/jobs/{job}/resume", {"json": {}}),
        ("DELETE", f"/v1/jobs/{job}", {}),
        ("GET", f"/v1/runs/{job}", {}),
        ("PATCH", f"/v1/runs/{job}/status", {"json": {"status": "FAILED"}}),
        ("GET", f"/api/2.0/mlflow/runs/get?run_id={job}", {}),
        ("GET", f"/api/2.0/mlflow/artifacts/list?run_id={job}", {}),
        ("GET", f"/api/2.0/mlflow/metrics/get-history?run_id={job}&metric_key=loss", {}),
        ("POST", "/api/2.0/mlflow/runs/log-metric", {"json": {**run, "key": "loss", "value": 1, "timestamp": 1}}),
        ("POST", "/api/2.0/mlflow/runs/set-tag", {"json": {**run, "key": "a", "value": "b"}}),
        ("GET", f"/api/2.0/mlflow-artifacts/presigned/0/{job}/artifacts/a", {}),
        ("POST", f"{objects}/addresses", {"json": {"reads": [f"s3://hanzo-ml/jobs/{job}/command/000001/exit.json"]}}),
        ("POST", f"{objects}/list", {"json": {"uri": f"s3://hanzo-ml/jobs/{job}", "recursive": True}}),
        ("GET", f"{objects}/content?uri=s3://hanzo-ml/jobs/{job}/command/000001/exit.json", {}),
    ]


def test_other_organization_is_refused_everything_about_a_job(prepared: TenantInstallation) -> None:
    job = prepared.submit(ACME, STAY)
    prepared.wait_for(job, Phase.RUNNING)
    theirs = prepared.submit(RIVAL, STAY)
    prepared.wait_for(theirs, Phase.RUNNING)
    pod = httpx.Client(
        base_url=prepared.url,
        headers={"Authorization": f"Bearer {prepared.program_token(RIVAL, theirs)}"},
        timeout=60,
        trust_env=False,
    )
    with prepared.client(RIVAL, "ml-admin") as admin, prepared.client(RIVAL) as researcher, pod:
        for caller in (admin, researcher, pod):
            for method, path, keys in requests_about(job.id):
                answer = caller.request(method, path, **keys)
                assert answer.status_code in (401, 403, 404), (method, path, answer.status_code, answer.text)
        assert [each["id"] for each in admin.get("/v1/jobs").json()["jobs"] if each["id"] == job.id] == []
        own = f"/v1/jobs/{theirs.id}/programs/command/objects/addresses"
        for uri in (f"s3://hanzo-ml/jobs/{job.id}/command/000001/exit.json", f"s3://hanzo-ml/runs/{job.id}/command.json"):
            assert pod.post(own, json={"reads": [uri]}).status_code == 403
            write = {"uri": uri, "sha256": "0" * 64}
            assert pod.post(own, json={"writes": [write]}).status_code == 403
    assert prepared.observe(job).phase is Phase.RUNNING
    end(prepared, {job: ACME, theirs: RIVAL})


def end(installation: TenantInstallation, jobs: dict[JobRef, str]) -> None:
    for job, organization in jobs.items():
        with installation.client(organization) as client:
            assert client.post(f"/v1/jobs/{job.id}/cancel").status_code == 200
        installation.compute.cancel(job)
    for job in jobs:
        installation.wait_for(job, Phase.FAILED)


def test_token_of_a_job_that_has_ended_opens_nothing(prepared: TenantInstallation) -> None:
    job = prepared.submit(ACME, STAY)
    prepared.wait_for(job, Phase.RUNNING)
    headers = {"Authorization": f"Bearer {prepared.program_token(ACME, job)}"}
    body = {"uri": f"s3://hanzo-ml/jobs/{job.id}/command", "recursive": True}
    address = f"{prepared.url}/v1/jobs/{job.id}/programs/command/objects/list"

    def status() -> int:
        return httpx.post(address, json=body, headers=headers, trust_env=False).status_code

    assert status() == 200
    end(prepared, {job: ACME})
    wait_until(lambda: status() == 401, 60, lambda: str(status()))


@pytest.mark.requirement("X5")
def test_full_namespace_blocks_only_its_own_organization(prepared: TenantInstallation) -> None:
    jobs = [prepared.submit(ACME, "pass", resources=TOO_MANY_GPUS) for _ in range(MAX_OBJECTS + 1)]
    full = f"namespace {prepared.namespace(ACME)} is full"
    wait_until(
        lambda: sum(full in prepared.detail(ACME, job) for job in jobs) == 1,
        ENDS_WITHIN,
        lambda: str([prepared.detail(ACME, job) for job in jobs]),
    )
    [last] = [job for job in jobs if full in prepared.detail(ACME, job)]
    assert "exceeded quota" in prepared.detail(ACME, last) and prepared.observe(last).phase is Phase.PENDING
    prepared.wait_for(prepared.submit(RIVAL, "print('hello')"), Phase.SUCCEEDED)
    others = [job for job in jobs if job != last]
    end(prepared, dict.fromkeys(others[:1], ACME))
    prepared.wait_for_detail(ACME, last, "nvidia.com/gpu")
    end(prepared, dict.fromkeys([*others[1:], last], ACME))


@pytest.mark.requirement("X6")
def test_pod_that_asks_for_privileges_is_refused_in_a_tenant_s_namespace(prepared: TenantInstallation) -> None:
    container = {"name": "c", "image": "i", "securityContext": {"privileged": True}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "privileged", "namespace": prepared.namespace(RIVAL)},
        "spec": {"hostNetwork": True, "containers": [container]},
    }
    with pytest.raises(RuntimeError, match="PodSecurity"):
        prepared.cluster.apply(pod)


def test_deleted_organization_is_prepared_again(prepared: TenantInstallation) -> None:
    assert "confirm it with --yes" in prepared.run_cli("tenant", "delete", RIVAL).stderr
    namespace = prepared.namespace(RIVAL)
    prepared.tenant("delete", RIVAL, "--yes")
    prepared.cluster.kubectl("wait", f"namespace/{namespace}", "--for=delete", "--timeout=120s")
    prepared.forget_tenant(RIVAL)
    job = prepared.submit(RIVAL, "print('again')")
    prepared.wait_for_detail(RIVAL, job, "hanzo-ml tenant apply rival")
    prepared.apply_tenant(RIVAL)
    prepared.wait_for(job, Phase.SUCCEEDED)


def test_foreign_namespace_is_not_taken_over(prepared: TenantInstallation) -> None:
    name = f"{prepared.name}-system"
    prepared.cluster.kubectl("create", "namespace", name)
    try:
        done = prepared.run_cli("tenant", "apply", "system", "--kubeconfig", str(prepared.cluster.kubeconfig))
        assert done.returncode == 1 and "is not this organization's" in done.stderr
    finally:
        prepared.cluster.kubectl("delete", "namespace", name)
