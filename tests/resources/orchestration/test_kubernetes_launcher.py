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


class Orchestrator:
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
def orchestrator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    monkeypatch.setattr(kubernetes_launcher, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr("sensors.recover_run_workers.LAUNCH_TIME", timedelta(0))
    monkeypatch.setattr("sensors.recover_run_workers.EXIT_TIME", timedelta(0))
    monkeypatch.setattr("sensors.recover_run_workers.CANCEL_TIME", timedelta(0))
    monkeypatch.setattr("dagster_k8s.client.time.sleep", lambda seconds: None)
    with job_api(tmp_path) as (api, kubeconfig):
        orchestrator = Orchestrator(tmp_path, api, kubeconfig)
        yield orchestrator
        orchestrator.instance.dispose()


def test_run_worker_is_a_restricted_pod_that_is_not_restarted(orchestrator: Orchestrator) -> None:
    spec = orchestrator.job(orchestrator.launch())["spec"]
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


def test_api_server_that_does_not_answer_fails_no_run(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch()
    orchestrator.api.add_pod(name(run), "pod")
    for failing in (500, 403, 401):
        orchestrator.api.failing = failing
        assert orchestrator.health(run) == WorkerStatus.RUNNING
    orchestrator.api.failing = None
    assert orchestrator.health(run) == WorkerStatus.RUNNING


def test_lost_worker_is_removed_before_its_run_is_failed(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch()
    pod = orchestrator.api.add_pod(name(run), "pod")
    overdue = datetime.now(UTC) - timedelta(minutes=1)
    pod["metadata"]["deletionTimestamp"] = overdue.isoformat()
    orchestrator.job(run)["status"] = {"conditions": [{"type": "FailureTarget", "status": "True"}]}  # it waits for the pod
    assert orchestrator.health(run) == WorkerStatus.FAILED
    assert orchestrator.api.objects == {"jobs": {}, "pods": {}}


def test_ended_worker_fails_its_run_and_keeps_its_log(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch()
    orchestrator.api.add_pod(name(run), "pod", phase="Failed", reason="Evicted")
    orchestrator.job(run)["status"] = {"failed": 1}
    assert orchestrator.health(run) == WorkerStatus.FAILED
    assert "pod" in orchestrator.api.objects["pods"]


def test_run_launched_during_an_outage_starts_after_it(orchestrator: Orchestrator) -> None:
    orchestrator.api.failing = 503
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    assert orchestrator.api.objects["jobs"] == {}
    orchestrator.recover()
    orchestrator.api.failing = None
    orchestrator.recover()
    assert set(orchestrator.api.objects["jobs"]) == {name(run)}
    orchestrator.recover()
    assert orchestrator.status(run) == dg.DagsterRunStatus.STARTING


def test_launch_that_is_repeated_makes_no_second_worker(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    orchestrator.launcher.launch_run(LaunchRunContext(run, None))
    assert set(orchestrator.api.objects["jobs"]) == {name(run)}


def test_worker_that_waits_for_its_image_is_left_alone(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    state = {"name": "dagster", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waiting = {**state, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    orchestrator.api.add_pod(name(run), "pod", phase="Pending", containerStatuses=[waiting])
    orchestrator.recover()
    assert orchestrator.status(run) == dg.DagsterRunStatus.STARTING and "pod" in orchestrator.api.objects["pods"]


def test_run_whose_worker_ended_before_it_started_fails_with_the_reason(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    orchestrator.api.add_pod(name(run), "pod", phase="Failed", reason="Evicted", message="low on memory")
    orchestrator.job(run)["status"] = {"failed": 1}
    orchestrator.recover()
    assert orchestrator.status(run) == dg.DagsterRunStatus.FAILURE


def test_worker_of_a_run_that_is_over_is_removed_and_never_starts_later(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    orchestrator.api.add_pod(name(run), "pod", phase="Pending")
    other = orchestrator.launch()
    orchestrator.instance.report_run_failed(run)
    orchestrator.recover()
    assert set(orchestrator.api.objects["jobs"]) == {name(other)} and orchestrator.api.objects["pods"] == {}


def test_cancelled_run_whose_worker_is_gone_has_ended(orchestrator: Orchestrator) -> None:
    lost, alive = orchestrator.launch(), orchestrator.launch()
    for run in (lost, alive):
        orchestrator.api.add_pod(name(run), f"pod-of-{run.run_id}")
        orchestrator.instance.report_run_canceling(run)
    orchestrator.api.objects["jobs"].pop(name(lost))
    orchestrator.api.objects["pods"].pop(f"pod-of-{lost.run_id}")
    orchestrator.recover()
    assert orchestrator.status(lost) == dg.DagsterRunStatus.CANCELED
    assert orchestrator.status(alive) == dg.DagsterRunStatus.CANCELING


def test_worker_of_another_installation_in_the_same_namespace_is_left_alone(orchestrator: Orchestrator) -> None:
    """Its run is unknown here, like a deleted one."""
    deleted = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    other = orchestrator.launch()
    labels = orchestrator.job(other)["metadata"]["labels"]
    labels[INSTALLATION_LABEL] = "another"
    for run in (deleted, other):
        orchestrator.instance.delete_run(run.run_id)
    orchestrator.recover()
    assert set(orchestrator.api.objects["jobs"]) == {name(other)}


def test_cancelled_run_whose_worker_never_started_is_cancelled_at_once(orchestrator: Orchestrator) -> None:
    run = orchestrator.launch(dg.DagsterRunStatus.STARTING)
    assert orchestrator.launcher.terminate(run.run_id)
    assert orchestrator.status(run) == dg.DagsterRunStatus.CANCELED
    started = orchestrator.launch()
    assert orchestrator.launcher.terminate(started.run_id)
    assert orchestrator.status(started) == dg.DagsterRunStatus.CANCELING  # its worker reports the end


def test_checks_of_many_runs_share_a_listing(orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [orchestrator.launch() for _ in range(5)]
    for number, run in enumerate(runs):
        orchestrator.api.add_pod(name(run), f"pod-{number}")
    monkeypatch.setattr(kubernetes_launcher, "SNAPSHOT_SECONDS", 60.0)
    orchestrator.api.requests.clear()
    assert {orchestrator.health(run) for run in runs} == {WorkerStatus.RUNNING}
    assert len(orchestrator.api.requests) == 2


@pytest.mark.parametrize("item", launcher_objects(RunPods()), ids=lambda item: str(item["kind"]))
def test_accounts_and_permissions_of_the_launcher_are_valid_objects(item: dict[str, Any]) -> None:
    check(item)
    assert item["metadata"]["namespace"] == RunPods().namespace
