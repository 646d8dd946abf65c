"""deploy/: objects that the API server takes, and that fit the product: its settings, its processes, its jobs."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from fastapi.testclient import TestClient

from api.app import create_app
from api.server import refuse_open_network
from recipes.contracts.job import BadConfiguration, Distributed
from recipes.launch.pod import HEARTBEAT_PORT, RENDEZVOUS_PORT
from resources.compute.kubernetes.job_manifest import out_of_reach, render
from resources.compute.kubernetes.pod_manifest import USER_ID
from resources.metadata.database import Database
from resources.settings.scheduler import Scheduler
from resources.settings.settings import Settings
from resources.stack.services import list_services
from tests.resources.compute.kubernetes.jobs import a_job
from tests.resources.compute.kubernetes.schemas import check
from tests.resources.settings.test_settings import SPECIFICATION

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OBJECTS = [item for file in FILES for item in yaml.safe_load_all(file.read_text())]
SECRETS = {
    "HANZO_ML_DATABASE_URL": "postgresql://hanzo:password@postgres:5432/hanzo_ml",
    "HANZO_STORAGE_ACCESS_KEY": "access",
    "HANZO_STORAGE_SECRET_KEY": "secret",
}


def the(kind: str) -> dict[str, Any]:
    [found] = [item for item in OBJECTS if item["kind"] == kind]
    return dict(found)


POD = the("Deployment")["spec"]["template"]["spec"]
CONTAINERS = {container["name"]: container for container in POD["containers"]}


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["kind"])
def test_the_api_server_takes_every_object(item: dict[str, Any]) -> None:
    check(item)
    assert item["metadata"]["namespace" if item["kind"] != "Namespace" else "name"] == "hanzo-ml"


def test_an_installation_is_one_of_each_and_the_namespace_is_first() -> None:
    assert sorted(item["kind"] for item in OBJECTS) == ["ConfigMap", "Deployment", "Namespace", "NetworkPolicy", "Service"]
    assert OBJECTS[0]["kind"] == "Namespace"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The settings of the API's container: its file and its environment."""
    return Settings.load(environ(tmp_path))


def environ(folder: Path, **more: str) -> dict[str, str]:
    (folder / "config.yaml").write_text(the("ConfigMap")["data"]["config.yaml"])
    given = {variable["name"]: variable["value"] for variable in CONTAINERS["api"]["env"]}
    return given | SECRETS | {"HANZO_ML_CONFIG": str(folder / "config.yaml")} | more


def test_the_configuration_is_the_specification_s_value_by_value(settings: Settings) -> None:
    written = yaml.safe_load(the("ConfigMap")["data"]["config.yaml"])
    for section, keys in yaml.safe_load(SPECIFICATION).items():
        for key, value in keys.items():
            if (section, key) != ("database", "url"):  # it holds a password
                assert written[section][key] == value, (section, key)
    assert settings.database_url == SECRETS["HANZO_ML_DATABASE_URL"]
    assert settings.storage.secret_key is not None and settings.storage.secret_key.get_secret_value() == "secret"


def test_keys_of_ours_have_their_defaults_but_the_address_that_only_a_cluster_has(settings: Settings) -> None:
    service = the("Service")
    address = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:8057"
    assert settings.scheduler == Scheduler(tracking_uri=address)
    assert out_of_reach(a_job(), settings.scheduler) == []
    assert urlsplit(address).hostname in settings.server.allowed_hosts
    assert settings.auth.verify_tokens  # or the API would refuse to serve a network
    refuse_open_network(settings)


def test_secrets_are_named_and_nowhere_written() -> None:
    variables = set(re.findall(r"\$\{(\w+)\}", the("ConfigMap")["data"]["config.yaml"]))
    assert variables == set(SECRETS)
    instructions = (ROOT / "deploy" / "kubernetes" / "0-namespace.yaml").read_text()
    for container in [*POD["initContainers"], *CONTAINERS.values()]:
        assert container["envFrom"] == [{"secretRef": {"name": "hanzo-ml-secrets"}}]
        assert not {variable["name"] for variable in container["env"]} & variables
    assert all(f"--from-literal={variable}=" in instructions for variable in variables)


def test_variables_that_kubernetes_would_add_for_our_service_are_kept_out(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="HANZO_ML_SERVICE_HOST"):
        Settings.load(environ(tmp_path, HANZO_ML_SERVICE_HOST="10.0.0.1"))
    assert POD["enableServiceLinks"] is False


def test_the_containers_run_what_the_laptop_s_stack_runs(settings: Settings) -> None:
    ours = {service.name: list(service.command[1:]) for service in list_services(settings) if service.name != "engine"}
    for command in ours.values():  # the checkout is a folder of the image
        command[:] = [word.replace(str(ROOT), "/opt/hanzo-ml") for word in command]
    assert {name: container["command"][1:] for name, container in CONTAINERS.items()} == ours
    assert all(container["command"][0] == "python" for container in CONTAINERS.values())


def test_before_all_of_them_the_databases_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [migrate] = POD["initContainers"]
    assert migrate["command"][:2] == ["python", "-c"]
    made: list[str] = []
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path))
    monkeypatch.setattr("resources.orchestration.instance.migrate_dagster", lambda settings, console: made.append("dagster"))
    exec(compile(migrate["command"][2], "migrate", "exec"), {})
    assert made == ["dagster"] and (tmp_path / "hanzo-ml.db").is_file() and (tmp_path / "run-workers").is_dir()


def test_the_probes_are_answered(tmp_path: Path) -> None:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path), "HANZO_ML_SERVER_HOST": "0.0.0.0"})
    Database(settings.database_url).migrate()
    with TestClient(create_app(settings), base_url="http://10.1.2.3:8057") as http:
        for probe in ("readinessProbe", "livenessProbe"):
            get = CONTAINERS["api"][probe]["httpGet"]
            assert http.get(get["path"]).status_code == 200
            assert get["port"] in [port["name"] for port in CONTAINERS["api"]["ports"]]


def test_the_service_is_the_api_and_no_job(settings: Settings) -> None:
    service = the("Service")["spec"]
    outside = {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]}
    inside = {port["name"]: port["containerPort"] for port in CONTAINERS["api"]["ports"]}
    assert outside == {"api": (8057, "api"), "metrics": (9090, "metrics")}
    assert inside == {"api": settings.server.port, "metrics": settings.metrics.port}
    assert service["selector"].items() <= the("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert not service["selector"].items() <= job_labels().items()


def job_labels(gang_backend: Any = "kueue") -> dict[str, str]:
    """Labels of the pods of a job."""
    run = render(a_job(distributed=Distributed(num_nodes=2)), Scheduler(gang_backend=gang_backend))[-1]
    spec = run["spec"]["replicatedJobs"][0]["template"]["spec"] if gang_backend == "kueue" else run["spec"]
    return dict(spec["template"]["metadata"]["labels"])


@pytest.mark.parametrize("gang_backend", ["kueue", "indexed_job"])
def test_jobs_reach_store_api_each_other_and_names_and_nothing_else(gang_backend: str) -> None:
    policy = the("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= job_labels(gang_backend).items()
    assert sorted(policy["policyTypes"]) == ["Egress", "Ingress"]
    allowed = {}
    for rule in policy["egress"]:
        [peer] = rule["to"]  # a rule without `to`, or with an ipBlock, would let the internet in
        [selector] = peer.values()
        [label] = selector["matchLabels"].values()
        allowed[label] = [(port["protocol"], port["port"], port.get("endPort")) for port in rule["ports"]]
    gang = [("TCP", HEARTBEAT_PORT, None), ("TCP", RENDEZVOUS_PORT, None), ("TCP", 32768, 60999)]
    assert allowed == {
        "hanzo-ml-job": gang,
        the("Deployment")["spec"]["template"]["metadata"]["labels"]["app"]: [("TCP", 8057, None)],
        "minio": [("TCP", 9000, None)],
        "kube-system": [("UDP", 53, None), ("TCP", 53, None)],
    }
    [ingress] = policy["ingress"]
    assert ingress["from"][0]["podSelector"] == policy["podSelector"]


def test_the_pod_keeps_to_the_profile_that_the_namespace_enforces() -> None:
    assert the("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert POD["securityContext"]["runAsNonRoot"] is True and POD["securityContext"]["runAsUser"] == USER_ID
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*POD["initContainers"], *CONTAINERS.values()]:
        assert container["image"] == "hanzoai/ml:latest"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert POD["automountServiceAccountToken"] is False
    assert all(set(volume) <= {"name", "configMap", "emptyDir"} for volume in POD["volumes"])
