"""Namespaces of organizations: their objects, and what the setup command refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.contracts.job import BadConfiguration
from resources.compute.kubernetes.setup.check import check_tenants
from resources.compute.kubernetes.setup.queues import render_queues
from resources.compute.kubernetes.setup.tenants import main, refuse_foreign_namespace, render_namespace, render_tenant
from resources.settings.settings import Settings
from tests.resources.compute.kubernetes.api_server import ApiServer, serving
from tests.resources.compute.kubernetes.schemas import check

CONFIG: dict[str, Any] = {
    "storage": {"endpoint": "http://s3.hanzo.svc:7070"},
    "scheduler": {
        "namespace_per_organization": True,
        "capacity": {"cpu": {"cpu": 4, "memory": "8Gi"}},
        "max_objects": 20,
        "max_storage": "2Ti",
        "job_secret": "hub",
        "volumes": [{"claim": "library", "path": "/library"}],
    },
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path))
    monkeypatch.setenv("HANZO_ML_CONFIG", str(file))
    return Settings.load()


def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in objects}


@pytest.mark.requirement("Z12")
@pytest.mark.parametrize("organization", ["acme", "Acme Inc."])
def test_api_server_accepts_the_objects_of_an_organization(settings: Settings, organization: str) -> None:
    objects = render_tenant(settings, organization)
    assert [item["kind"] for item in objects] == [
        *("Namespace", "ResourceQuota", "LimitRange", "Role", "RoleBinding", "NetworkPolicy", "LocalQueue")
    ]
    for item in objects:
        check(item)
    namespace = objects[0]["metadata"]["name"]
    assert {item["metadata"]["namespace"] for item in objects[1:]} == {namespace}


def test_default_organization_has_the_same_objects(settings: Settings) -> None:
    own, theirs = by_kind(render_namespace(settings)), by_kind(render_tenant(settings, "acme"))
    assert own["Namespace"]["metadata"]["name"] == "hanzo-ml" and own.keys() | {"LocalQueue"} == theirs.keys()
    assert own["Namespace"]["metadata"]["labels"] == theirs["Namespace"]["metadata"]["labels"]
    for kind in own.keys() - {"Namespace"}:
        assert {**own[kind], "metadata": None} == {**theirs[kind], "metadata": None}


def test_namespace_keeps_to_the_restricted_profile_and_is_admitted_by_the_queue(settings: Settings) -> None:
    labels = by_kind(render_tenant(settings, "acme"))["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    queue = by_kind(render_queues(settings.scheduler))["ClusterQueue"]
    assert queue["spec"]["namespaceSelector"]["matchLabels"].items() <= labels.items()


def test_quota_limits_objects_and_storage_and_never_gpus_or_pods(settings: Settings) -> None:
    hard = by_kind(render_tenant(settings, "acme"))["ResourceQuota"]["spec"]["hard"]
    assert hard["count/configmaps"] == "21" and hard["count/jobsets.jobset.x-k8s.io"] == "20"
    assert hard["requests.storage"] == "2Ti"
    assert not [name for name in hard if "gpu" in name or "pods" in name or name.startswith(("cpu", "memory"))]


def test_account_of_the_control_plane_may_act_there(settings: Settings) -> None:
    [subject] = by_kind(render_tenant(settings, "acme"))["RoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "hanzo-ml", "namespace": "hanzo"}


def test_command_prints_the_objects_and_needs_no_cluster(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry-run", "apply", "acme"])
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == render_tenant(settings, "acme")


@pytest.mark.parametrize("organization", ["default", " "])
def test_default_organization_is_prepared_by_another_command(settings: Settings, organization: str) -> None:
    with pytest.raises(SystemExit, match="hanzo-ml cluster render"):
        main(["--dry-run", "apply", organization])


def test_organizations_without_namespaces_are_refused(settings: Settings) -> None:
    shared = settings.scheduler.model_copy(update={"namespace_per_organization": False})
    with pytest.raises(BadConfiguration, match=r"scheduler\.namespace_per_organization is false"):
        render_tenant(settings.model_copy(update={"scheduler": shared}), "acme")


def put(server: ApiServer, path: str, item: dict[str, Any]) -> None:
    server.items[path] = json.loads(json.dumps(item))


def test_foreign_namespace_is_not_taken_over(settings: Settings) -> None:
    wanted = render_tenant(settings, "system")[0]
    with serving() as server:
        refuse_foreign_namespace(server.cluster, wanted)
        put(server, "/api/v1/namespaces/hanzo-ml-system", {"metadata": {"name": "hanzo-ml-system"}})
        with pytest.raises(BadConfiguration, match="is not this organization's"):
            refuse_foreign_namespace(server.cluster, wanted)
        put(server, "/api/v1/namespaces/hanzo-ml-system", wanted)
        refuse_foreign_namespace(server.cluster, wanted)


def test_check_names_what_an_organization_lacks_and_the_command(settings: Settings) -> None:
    with serving() as server:
        missing = {finding.subject: finding for finding in check_tenants(server.cluster, settings)}
        assert "Namespace hanzo-ml" in missing["organization default"].problem and missing.keys() == {"organization default"}
        put(server, "/api/v1/namespaces/hanzo-ml-acme", render_tenant(settings, "acme")[0])
        found = {finding.subject: finding for finding in check_tenants(server.cluster, settings)}
    acme = found["organization acme"]
    assert "ResourceQuota hanzo-ml" in acme.problem and "Secret hub" in acme.problem
    assert "PersistentVolumeClaim library" in acme.problem and "Namespace" not in acme.problem
    assert acme.mend == "hanzo-ml tenant apply acme"


def test_check_expects_the_organizations_of_the_quotas(settings: Settings) -> None:
    scheduler = settings.scheduler.model_validate({**CONFIG["scheduler"], "quotas": {"Acme Inc": {"max_gpus": 2}}})
    with serving() as server:
        found = list(check_tenants(server.cluster, settings.model_copy(update={"scheduler": scheduler})))
    assert found[-1].mend == "hanzo-ml tenant apply 'Acme Inc'"


def test_check_names_a_store_that_no_policy_can_name(settings: Settings) -> None:
    storage = settings.storage.model_copy(update={"endpoint": "https://s3.eu-central-1.amazonaws.com"})
    with serving() as server:
        [finding] = check_tenants(server.cluster, settings.model_copy(update={"storage": storage}))
    assert finding.subject == "network policies" and "set scheduler.egress" in finding.problem
