"""Run workers as pods: their Job, health through outages, and at most one per run."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.launcher import LaunchRunContext, WorkerStatus
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin

from resources.orchestration import kubernetes_launcher
from resources.orchestration.kubernetes_instance import INSTALLATION_LABEL, kubernetes_instance
from resources.orchestration.kubernetes_launcher import KubernetesRunLauncher
from resources.orchestration.launcher_role import launcher_objects
from resources.settings.sections import RunPods
from resources.settings.settings import Settings
from sensors.recover_run_workers import recover_run_workers
from tests.resources.compute.kubernetes.schemas import check
from tests.resources.orchestration.job_api import JobApi, job_api

SETTINGS = {
    "database": {"url": "postgresql://u@db/hanzo"},
    "storage": {"endpoint": "http://s3:9000"},
    "scheduler": {"volumes": [{"claim": "packages", "path": "/opt/packages"}], "default_image": "registry/ml:1"},
    "dagster": {"run_pods": {"env": {"PYTHONPATH": "/opt/packages"}}},
}
ORIGIN = JobPythonOrigin(
    "__ASSET_JOB",
    RepositoryPythonOrigin(
        executable_path="/elsewhere/python",
        code_pointer=ModuleCodePointer("hanzo_ml_assets.definitions", "definitions", None),
        entry_point=["/elsewhere/python", "-m", "dagster"],
    ),
)


class House:
    def __init__(self, folder: Path, api: JobApi, kubeconfig: Path) -> None:
        self.api = api
        settings = Settings(home=folder, **SETTINGS).model_copy()
        scheduler = settings.scheduler.model_copy(update={"kubeconfig": str(kubeconfig)})
        config = kubernetes_instance(settings.model_copy(update={"scheduler": scheduler}))
        overrides = {"run_launcher": config["run_launcher"]}
        self.instance = dg.DagsterInstance.local_temp(str(folder), overrides=overrides)
        launcher = self.instance.run_launcher
        assert isinstance(launcher, KubernetesRunLauncher)
        self.launcher = launcher

    def run(self, status: dg.DagsterRunStatus) -> dg.DagsterRun:
        run = dg.DagsterRun(job_name="__ASSET_JOB", status=status, job_code_origin=ORIGIN)
        return self.instance.add_run(run)

    def launch(self, status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED) -> dg.DagsterRun:
        run = self.run(status)
        self.launcher.launch_run(LaunchRunContext(run, None))
        return run

    def job(self, run: dg.DagsterRun) -> dict[str, Any]:
        return self.api.objects["jobs"][name(run)]

    def status(self, run: dg.DagsterRun) -> dg.DagsterRunStatus:
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status

    def health(self, run: dg.DagsterRun) -> WorkerStatus:
        return self.launcher.check_run_worker_health(run).status

    def recover(self) -> None:
        recover_run_workers.on(None)(dg.build_sensor_context(self.instance))  # type: ignore[arg-type]


def name(run: dg.DagsterRun) -> str:
    return f"dagster-run-{run.run_id}"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(kubernetes_launcher, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr("sensors.recover_run_workers.LAUNCH_TIME", timedelta(0))
    monkeypatch.setattr("sensors.recover_run_workers.EXIT_TIME", timedelta(0))
    monkeypatch.setattr("sensors.recover_run_workers.CANCEL_TIME", timedelta(0))
    monkeypatch.setattr("dagster_k8s.client.time.sleep", lambda seconds: None)
    with job_api(tmp_path) as (api, kubeconfig):
        house = House(tmp_path, api, kubeconfig)
        yield house
        house.instance.dispose()


def test_run_worker_is_a_restricted_pod_that_is_not_restarted(house: House) -> None:
    spec = house.job(house.launch())["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert container["image"] == "registry/ml:1"
    assert container["args"][:5] == ["python", "-m", "dagster", "api", "execute_run"]
    assert container["resources"]["limits"] == {"memory": "250M"}
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert {"name": "PYTHONPATH", "value": "/opt/packages"} in container["env"]
    assert {"mountPath": "/opt/packages", "name": "claim-0", "readOnly": True} in container["volumeMounts"]
    assert {"name": "claim-0", "persistentVolumeClaim": {"claimName": "packages"}} in pod["volumes"]
    assert [toleration["tolerationSeconds"] for toleration in pod["tolerations"]] == [5, 5]


def test_api_server_that_does_not_answer_fails_no_run(house: House) -> None:
    run = house.launch()
    house.api.add_pod(name(run), "pod")
    for failing in (500, 403, 401):
        house.api.failing = failing
        assert house.health(run) == WorkerStatus.RUNNING
    house.api.failing = None
    assert house.health(run) == WorkerStatus.RUNNING


def test_lost_worker_is_removed_before_its_run_is_failed(house: House) -> None:
    run = house.launch()
    pod = house.api.add_pod(name(run), "pod")
    overdue = datetime.now(UTC) - timedelta(minutes=1)
    pod["metadata"]["deletionTimestamp"] = overdue.isoformat()
    house.job(run)["status"] = {"conditions": [{"type": "FailureTarget", "status": "True"}]}  # it waits for the pod
    assert house.health(run) == WorkerStatus.FAILED
    assert house.api.objects == {"jobs": {}, "pods": {}}


def test_ended_worker_fails_its_run_and_keeps_its_log(house: House) -> None:
    run = house.launch()
    house.api.add_pod(name(run), "pod", phase="Failed", reason="Evicted")
    house.job(run)["status"] = {"failed": 1}
    assert house.health(run) == WorkerStatus.FAILED
    assert "pod" in house.api.objects["pods"]


def test_run_launched_during_an_outage_starts_after_it(house: House) -> None:
    house.api.failing = 503
    run = house.launch(dg.DagsterRunStatus.STARTING)
    assert house.api.objects["jobs"] == {}
    house.recover()
    house.api.failing = None
    house.recover()
    assert set(house.api.objects["jobs"]) == {name(run)}
    house.recover()
    assert house.status(run) == dg.DagsterRunStatus.STARTING


def test_launch_that_is_repeated_makes_no_second_worker(house: House) -> None:
    run = house.launch(dg.DagsterRunStatus.STARTING)
    house.launcher.launch_run(LaunchRunContext(run, None))
    assert set(house.api.objects["jobs"]) == {name(run)}


def test_worker_that_waits_for_its_image_is_left_alone(house: House) -> None:
    run = house.launch(dg.DagsterRunStatus.STARTING)
    state = {"name": "dagster", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waiting = {**state, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    house.api.add_pod(name(run), "pod", phase="Pending", containerStatuses=[waiting])
    house.recover()
    assert house.status(run) == dg.DagsterRunStatus.STARTING and "pod" in house.api.objects["pods"]


def test_run_whose_worker_ended_before_it_started_fails_with_the_reason(house: House) -> None:
    run = house.launch(dg.DagsterRunStatus.STARTING)
    house.api.add_pod(name(run), "pod", phase="Failed", reason="Evicted", message="low on memory")
    house.job(run)["status"] = {"failed": 1}
    house.recover()
    assert house.status(run) == dg.DagsterRunStatus.FAILURE


def test_worker_of_a_run_that_is_over_is_removed_and_never_starts_later(house: House) -> None:
    run = house.launch(dg.DagsterRunStatus.STARTING)
    house.api.add_pod(name(run), "pod", phase="Pending")
    other = house.launch()
    house.instance.report_run_failed(run)
    house.recover()
    assert set(house.api.objects["jobs"]) == {name(other)} and house.api.objects["pods"] == {}


def test_cancelled_run_whose_worker_is_gone_has_ended(house: House) -> None:
    lost, alive = house.launch(), house.launch()
    for run in (lost, alive):
        house.api.add_pod(name(run), f"pod-of-{run.run_id}")
        house.instance.report_run_canceling(run)
    house.api.objects["jobs"].pop(name(lost))
    house.api.objects["pods"].pop(f"pod-of-{lost.run_id}")
    house.recover()
    assert house.status(lost) == dg.DagsterRunStatus.CANCELED
    assert house.status(alive) == dg.DagsterRunStatus.CANCELING


def test_worker_of_another_installation_in_the_same_namespace_is_left_alone(house: House) -> None:
    """Its run is unknown here, like a deleted one."""
    deleted = house.launch(dg.DagsterRunStatus.STARTING)
    other = house.launch()
    labels = house.job(other)["metadata"]["labels"]
    labels[INSTALLATION_LABEL] = "another"
    for run in (deleted, other):
        house.instance.delete_run(run.run_id)
    house.recover()
    assert set(house.api.objects["jobs"]) == {name(other)}


def test_cancelled_run_whose_worker_never_started_is_cancelled_at_once(house: House) -> None:
    run = house.launch(dg.DagsterRunStatus.STARTING)
    assert house.launcher.terminate(run.run_id)
    assert house.status(run) == dg.DagsterRunStatus.CANCELED
    started = house.launch()
    assert house.launcher.terminate(started.run_id)
    assert house.status(started) == dg.DagsterRunStatus.CANCELING  # its worker reports the end


def test_checks_of_many_runs_share_a_listing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [house.launch() for _ in range(5)]
    for number, run in enumerate(runs):
        house.api.add_pod(name(run), f"pod-{number}")
    monkeypatch.setattr(kubernetes_launcher, "SNAPSHOT_SECONDS", 60.0)
    house.api.requests.clear()
    assert {house.health(run) for run in runs} == {WorkerStatus.RUNNING}
    assert len(house.api.requests) == 2


@pytest.mark.parametrize("item", launcher_objects(RunPods()), ids=lambda item: str(item["kind"]))
def test_accounts_and_permissions_of_the_launcher_are_valid_objects(item: dict[str, Any]) -> None:
    check(item)
    assert item["metadata"]["namespace"] == RunPods().namespace
