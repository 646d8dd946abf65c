"""deploy/kubernetes: valid API objects that match the product's settings, processes and permissions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from api.app import create_app
from api.server import refuse_open_network
from recipes.contracts.job import BadConfiguration
from recipes.contracts.quantities import parse_duration
from resources.compute.kubernetes.pod_manifest import USER_ID
from resources.compute.kubernetes.setup.queues import render_queues
from resources.compute.kubernetes.setup.render import render_cluster
from resources.metadata.database import Database
from resources.orchestration.kubernetes_instance import CONFIG, SECRET_VARIABLES, STATE
from resources.settings.sections import DAGSTER_PREFIX
from resources.settings.settings import Settings
from resources.stack.liveness import LIVENESS_SECONDS, liveness_file
from resources.stack.run_service import find_service
from resources.stack.services import list_services
from tests.deploy.kustomization import FOLDERS, Item, find, render
from tests.resources.compute.kubernetes.schemas import check

SECRETS = {
    "database-url": "postgresql://hanzo:password@postgres:5432/hanzo_ml",
    "storage-access-key": "access",
    "storage-secret-key": "secret",
    "engine-token": "t" * 64,
    "postgres-password": "password",
}
"""Keys of the Secret hanzo-ml-secrets."""
OURS = "hanzoai/"


@pytest.fixture(params=FOLDERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(name: str) -> list[Item]:
    return render(FOLDERS[name])


def deployments(objects: list[Item]) -> list[Item]:
    return [item for item in objects if item["kind"] == "Deployment"]


def pod(item: Item) -> Item:
    return dict(item["spec"]["template"]["spec"])


def containers(item: Item) -> list[Item]:
    return [*pod(item).get("initContainers", ()), *pod(item)["containers"]]


def services_of(objects: list[Item]) -> Iterator[tuple[str, Item, Item]]:
    """Yield the name, container and Deployment of each service of the stack."""
    for item in deployments(objects):
        for container in pod(item)["containers"]:
            if "resources.stack.run_service" in container.get("command", ()):
                yield container["command"][-1], container, item


def load(objects: list[Item], container: Item, folder: Path, **more: str) -> Settings:
    """Return the settings of a container, from its file and its environment."""
    config = find(objects, "ConfigMap", "hanzo-ml")["data"]["config.yaml"]
    (folder / "config.yaml").write_text(config)
    return Settings.load(environment(container) | {"HANZO_ML_CONFIG": str(folder / "config.yaml")} | more)


def environment(container: Item) -> dict[str, str]:
    found = {}
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "hanzo-ml-secrets"
            found[variable["name"]] = SECRETS[reference["key"]]
    return found


def test_api_server_takes_every_object(objects: list[Item]) -> None:
    for item in objects:
        check(item)
    keys = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(keys) == len(set(keys))


@pytest.mark.requirement("A5", "Z3")
def test_small_installation_has_one_deployment_service_and_config_map() -> None:
    kinds = [item["kind"] for item in render(FOLDERS["small"])]
    assert [kinds.count(kind) for kind in ("Deployment", "Service", "ConfigMap")] == [1, 1, 1]


def test_only_production_runs_the_event_relay(tmp_path: Path) -> None:
    for name, folder in FOLDERS.items():
        objects = render(folder)
        running = {service: container for service, container, _ in services_of(objects)}
        settings = load(objects, running["api"], tmp_path)
        assert ("relay" in running) is bool(settings.stream.brokers) is (name == "production")


def test_every_service_of_the_stack_runs_and_nothing_else(objects: list[Item], tmp_path: Path) -> None:
    running = {name: container for name, container, _ in services_of(objects)}
    for service, container in running.items():
        settings = load(objects, container, tmp_path)
        assert find_service(settings, service).name == service
        assert set(running) == {each.name for each in list_services(settings)}
    others = {tuple(each["command"]) for item in deployments(objects) for each in pod(item).get("initContainers", ())}
    assert ("python", "-m", "resources.orchestration.migrate") in others


def test_settings_are_safe_for_an_installation_reachable_by_network(objects: list[Item], tmp_path: Path) -> None:
    for _, container, _ in services_of(objects):
        settings = load(objects, container, tmp_path)
        refuse_open_network(settings)
        assert settings.auth.verify_tokens and settings.scheduler.backend == "kubernetes"
        assert render_queues(settings.scheduler)
    api = next(container for name, container, _ in services_of(objects) if name == "api")
    settings = load(objects, api, tmp_path)
    assert settings.database_url == SECRETS["database-url"] and settings.engine.token is not None
    host = str(settings.scheduler.tracking_uri).removeprefix("http://").partition(":")[0]
    assert host in settings.server.allowed_hosts
    assert host.partition(".")[0] in {item["metadata"]["name"] for item in objects if item["kind"] == "Service"}


def test_service_link_variables_of_kubernetes_are_disabled(objects: list[Item], tmp_path: Path) -> None:
    api = next(container for name, container, _ in services_of(objects) if name == "api")
    with pytest.raises(BadConfiguration, match="HANZO_ML_SERVICE_HOST"):
        load(objects, api, tmp_path, HANZO_ML_SERVICE_HOST="10.0.0.1")
    assert all(pod(item)["enableServiceLinks"] is False for item in deployments(objects))


@pytest.mark.requirement("U2", "X3")
def test_secrets_are_references_and_nowhere_written(objects: list[Item]) -> None:
    assert not [item for item in objects if item["kind"] == "Secret"]
    for item in deployments(objects):
        for container in containers(item):
            variables = environment(container) if "env" in container else {}
            for variable, key in SECRET_VARIABLES.items():
                assert variables.get(variable, SECRETS[key]) == SECRETS[key]
            assert "envFrom" not in container
    config = find(objects, "ConfigMap", "hanzo-ml")["data"]["config.yaml"]
    document = yaml.safe_load(config)
    assert "database" not in document and "token" not in document["engine"]
    assert not {"access_key", "secret_key"} & set(document["storage"])


def test_engine_pods_know_neither_database_nor_object_store() -> None:
    for folder in (FOLDERS["base"], FOLDERS["demo"], FOLDERS["production"]):
        engine = find(render(folder), "Deployment", "engine")
        [container] = containers(engine)
        assert {variable["name"] for variable in container["env"]} == {"HANZO_ML_HOME", "HOME", "HANZO_ML_ENGINE_TOKEN"}


def test_pods_keep_to_the_restricted_profile_and_write_to_nothing_that_must_survive(objects: list[Item]) -> None:
    for namespace in ("hanzo", "hanzo-ml"):
        labels = find(objects, "Namespace", namespace)["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for item in deployments(objects):
        security = pod(item)["securityContext"]
        assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(item):
            if container["image"].startswith(OURS):
                assert security["runAsUser"] == USER_ID
            assert container["imagePullPolicy"] == "IfNotPresent"
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        places = {mount["mountPath"] for container in containers(item) for mount in container.get("volumeMounts", ())}
        if item["metadata"]["name"] not in ("postgres", "s3"):
            assert {STATE, CONFIG, "/tmp"} <= places
            assert all(set(volume) <= {"name", "configMap", "emptyDir"} for volume in pod(item)["volumes"])


@pytest.mark.requirement("U4")
def test_roles_are_those_of_the_code(objects: list[Item], tmp_path: Path) -> None:
    api = next(container for name, container, _ in services_of(objects) if name == "api")
    settings = load(objects, api, tmp_path)
    wanted = render_cluster(settings)
    granting = ("ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    found = {describe(item) for item in objects if item["kind"] in granting}
    expected = {describe(item) for item in wanted if item["kind"] in granting}
    more = {json.loads(each)["metadata"]["name"] for each in found - expected}
    assert expected <= found and more <= {"hanzo-ml-launches-runs"}
    for namespace in (item for item in wanted if item["kind"] == "Namespace"):
        # `hanzo-ml cluster render | kubectl apply` must not remove what the overlay has set.
        assert find(objects, "Namespace", namespace["metadata"]["name"]) == namespace


def describe(item: Item) -> str:
    return json.dumps(item, sort_keys=True)


TOKENS = {
    "code-server": "hanzo-ml-dagster",
    "dagster-daemon": "hanzo-ml-dagster",
    "dagster-webserver": "hanzo-ml-dagster",
    "controller": "hanzo-ml",
}
"""Service accounts of the services that talk to the API server."""


@pytest.mark.parametrize("folder", ["base", "production", "demo"])
def test_only_pods_that_talk_to_the_api_server_have_a_token(folder: str) -> None:
    for name, _, item in services_of(render(FOLDERS[folder])):
        spec = pod(item)
        assert spec["automountServiceAccountToken"] is (name in TOKENS), name
        assert spec.get("serviceAccountName") == TOKENS.get(name, None if name == "engine" else "hanzo-ml")


@pytest.mark.parametrize("folder", ["base", "production", "demo"])
def test_only_pods_that_need_a_port_reach_it(folder: str) -> None:
    objects = render(FOLDERS[folder])
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in policies, "nobody else reaches anything"
    callers: dict[int, Any] = {}
    for policy in policies:
        for rule in policy.get("ingress", ()):
            for port in rule["ports"]:
                callers[port["port"]] = rule.get("from", "everybody")
    assert callers[8057] == callers[9090] == "everybody"
    assert callers[3000] == [{"podSelector": {"matchLabels": {"app": "hanzo-ml"}}}]
    assert callers[3030] == [
        {"podSelector": {"matchLabels": {"app": name}}} for name in ("dagster-daemon", "dagster-webserver")
    ]
    assert all("namespaceSelector" not in peer for peer in callers.get(5432, ()))
    ports = {
        port["containerPort"] for item in deployments(objects) for each in containers(item) for port in each.get("ports", ())
    }
    assert ports == set(callers)


@pytest.mark.requirement("U3")
def test_services_and_disruption_budgets_select_pods(objects: list[Item]) -> None:
    pods = [item["spec"]["template"]["metadata"]["labels"] for item in deployments(objects)]
    for item in objects:
        selector = item.get("spec", {}).get("selector", {})
        if item["kind"] in ("Service", "PodDisruptionBudget"):
            labels = selector.get("matchLabels", selector)
            [matching] = [each for each in deployments(objects) if labels.items() <= pod_labels(each).items()]
            ports = {port["name"] for container in containers(matching) for port in container.get("ports", ())}
            assert all(port["targetPort"] in ports for port in item["spec"].get("ports", ()))
        if item["kind"] == "PodDisruptionBudget":
            assert matching["spec"]["replicas"] > item["spec"]["minAvailable"], "a node could never be drained"
    assert all(labels["app.kubernetes.io/part-of"] == "hanzo-ml" for labels in pods)


def pod_labels(item: Item) -> dict[str, str]:
    return dict(item["spec"]["template"]["metadata"]["labels"])


@pytest.mark.requirement("U2", "U3", "V1")
def test_probes_and_metrics_annotations_match_the_api(objects: list[Item], tmp_path: Path) -> None:
    [(container, item)] = [(container, item) for name, container, item in services_of(objects) if name == "api"]
    annotations = item["spec"]["template"]["metadata"]["annotations"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    settings = load(objects, container, tmp_path)
    assert ports == {"api": settings.server.port, "metrics": settings.metrics.port}
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(ports["metrics"])}
    variables = {"HANZO_ML_HOME": str(tmp_path / "local"), "HANZO_ML_SERVER_HOST": "0.0.0.0"}
    local = Settings.load(variables)
    Database(local.database_url).migrate()
    with TestClient(create_app(local), base_url="http://10.1.2.3:8057") as http:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = container[probe]["httpGet"]
            assert http.get(get["path"]).status_code == 200 and get["port"] == "api"


def test_probes_of_other_services_match_their_endpoints(objects: list[Item]) -> None:
    for name, container, _ in services_of(objects):
        if name in ("dagster-daemon", "controller"):
            file = str(liveness_file(Path(STATE), name))
            command = container["livenessProbe"]["exec"]["command"][-1]
            assert f"find {file} -mmin -{LIVENESS_SECONDS // 60})" in command
        if name == "dagster-webserver" and "livenessProbe" in container:
            assert container["livenessProbe"]["httpGet"]["path"] == f"{DAGSTER_PREFIX}/server_info"


def test_rolling_update_of_serving_pods_replaces_a_pod_only_when_another_is_ready(objects: list[Item]) -> None:
    for item in deployments(objects):
        if item["metadata"]["name"] in ("hanzo-ml", "engine"):
            assert item["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    api = find(objects, "Deployment", "hanzo-ml")
    [container] = [each for each in containers(api) if each["name"] == "api"]
    [drain] = [each["value"] for each in container["env"] if each["name"] == "HANZO_ML_SERVER_DRAIN"]
    rest = pod(api)["terminationGracePeriodSeconds"] - parse_duration(drain)
    assert parse_duration(drain) >= 5 and rest > 10, "what is left of a request after it"
