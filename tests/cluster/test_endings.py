"""Jobs that cannot continue end with equal reason and message everywhere.

They are shown in the API, on the command line and in Dagster.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from sqlalchemy import update

from hanzo_ml_assets.failure_reason import EXIT_REASON, failure_with_reason
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job
from resources.compute.base import Phase
from resources.metadata.tables import job_tokens, program_tokens
from tests.cluster.cluster import Cluster
from tests.cluster.installation import ENDS_WITHIN, wait_until
from tests.cluster.signed_in_installation import SignedInInstallation, environment_of
from tests.cluster.trainings import QUIET, Trainings, find_process

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

GPUS = 2
"""The quota of the queue."""
SCRATCH_LIMIT = "96Mi"
KEEP_MINUTES = 1
FULL_DISK_LABEL, INVALID_LABEL = "kubernetes.io/os", "no..name/rack"
NO_SUCH_IMAGE = "localhost/nothing-of-this-name:1"
ONE_FAILURE = {"schedule": {"retries": 0, "grace_period": "20s"}}
GREET = "print('hello')"
FAIL = "print('the last words', flush=True); raise SystemExit(3)"
COUNT = "import time\nfor second in range(20): print('second', second, flush=True); time.sleep(1)"
PRINT_FOR_EVER = COUNT.replace("range(20)", "range(100_000)")
CHILD_TAKES_MEMORY = """
import subprocess, sys
child = "held = [bytearray(1 << 20) for _ in range(2000)]"
print("starts a child", flush=True)
sys.exit(3 if subprocess.run([sys.executable, "-c", child]).returncode else 0)
"""
FILL_SCRATCH = """
import os, time
print("writes", flush=True)
with open(os.path.join(os.environ["HANZO_ML_CHECKPOINTS"], "large"), "wb") as file:
    for _ in range(300):
        file.write(bytes(1 << 20))
        file.flush()
"""
FEW_STEPS, MANY_STEPS = 40, 1_500
STAY = "\nwhile True: time.sleep(1)"


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignedInInstallation]:
    scheduler = {
        "start_limit": "15s",
        "user_commands": True,
        "user_node_labels": [FULL_DISK_LABEL, INVALID_LABEL],
        "scratch_limit": SCRATCH_LIMIT,
        "keep_failed_for": f"{KEEP_MINUTES}m",
    }
    folder = tmp_path_factory.mktemp("installation")
    with (
        SignedInInstallation(cluster, "ends", folder, gpus=GPUS, scheduler=scheduler) as installation,
        environment_of(installation),
        memory_scratch(cluster, installation.name),
    ):
        yield installation


@pytest.fixture(scope="module")
def trainings(installation: SignedInInstallation, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings.in_folder(installation, tmp_path_factory.mktemp("trainings"))


@contextmanager
def memory_scratch(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Give pods with a node selector for the operating system a size-limited scratch volume.

    It is full at its limit, as a disk is.
    """
    value = f'Object.spec.volumes.emptyDir{{medium: "Memory", sizeLimit: "{SCRATCH_LIMIT}"}}'
    patch = f'[JSONPatch{{op: "replace", path: "/spec/volumes/1/emptyDir", value: {value}}}]'
    chosen = f"has(object.spec.nodeSelector) && '{FULL_DISK_LABEL}' in object.spec.nodeSelector"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": namespace}}
    spec = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [rule],
        },
        "matchConditions": [{"name": "chosen", "expression": chosen}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }
    cluster.apply(
        {**api, "kind": "MutatingAdmissionPolicy", "spec": spec},
        {**api, "kind": "MutatingAdmissionPolicyBinding", "spec": {"policyName": namespace}},
    )
    try:
        yield
    finally:
        for kind in ("mutatingadmissionpolicybinding", "mutatingadmissionpolicy"):
            cluster.kubectl("delete", kind, namespace)


def test_missing_image_fails_with_the_registry_message_and_frees_its_gpus(installation: SignedInInstallation) -> None:
    job = installation.submit_command(GREET, image=NO_SUCH_IMAGE, resources={"gpus": GPUS})
    installation.assert_failed(job, ExitReason.BAD_CONFIGURATION, f"image {NO_SUCH_IMAGE} cannot be pulled", "failed to")
    installation.assert_completed(installation.submit_command(GREET, resources={"gpus": GPUS}))


def test_child_process_that_takes_too_much_memory_is_named_with_limit_and_peak(installation: SignedInInstallation) -> None:
    job = installation.submit_command(CHILD_TAKES_MEMORY, **ONE_FAILURE)
    installation.assert_failed(job, ExitReason.OOM_KILLED, "memory limit of 0.39 GiB, peak 0.39 GiB")
    assert "starts a child" in installation.log_of(job.id)


def test_pod_that_outgrows_its_scratch_volume_is_evicted_with_the_kubelet_message(
    installation: SignedInInstallation,
) -> None:
    job = installation.submit_command(FILL_SCRATCH + STAY, **ONE_FAILURE)
    installation.assert_failed(
        job, ExitReason.STORAGE_FULL, "was evicted", f'EmptyDir volume "work" exceeds the limit "{SCRATCH_LIMIT}"'
    )
    assert "writes" in installation.log_of(job.id)


def test_full_disk_is_named_although_nothing_can_be_written_to_it(installation: SignedInInstallation) -> None:
    job = installation.submit_command(FILL_SCRATCH, pod={"node_selector": {FULL_DISK_LABEL: "linux"}}, **ONE_FAILURE)
    installation.assert_failed(job, ExitReason.STORAGE_FULL, "No space left on device")


def test_pods_refused_by_the_cluster_fail_the_job_with_its_message(installation: SignedInInstallation) -> None:
    answer = installation.http.post("/v1/jobs", json={"name": "x", "command": ["x"], "resources": {"memory": "lots"}})
    assert answer.status_code == 400 and "resources.memory" in answer.json()["message"]
    job = installation.submit_command(GREET, pod={"node_selector": {INVALID_LABEL: "a"}})
    installation.assert_failed(job, ExitReason.BAD_CONFIGURATION, "Invalid value", INVALID_LABEL)


def test_name_of_two_hundred_characters_runs(installation: SignedInInstallation) -> None:
    name = "A long Name_" * 16 + "12345678"
    assert len(name) == 200
    assert installation.assert_completed(installation.submit_command(GREET, name=name))["name"] == name


def test_job_set_deleted_by_hand_is_created_again_and_says_so(installation: SignedInInstallation) -> None:
    job = installation.submit_command(COUNT)
    installation.wait_until_running(job)
    wait_until(lambda: "second 2" in installation.log_of(job.id), ENDS_WITHIN, lambda: installation.describe(job.ref))
    name = installation.jobs.get(job.ref).name
    installation.cluster.kubectl("delete", "jobset", name, f"--namespace={installation.name}", "--wait=false")
    words = "the objects of the job were deleted from the cluster"
    wait_until(lambda: words in installation.state(job.id)["detail"], ENDS_WITHIN, lambda: installation.describe(job.ref))
    installation.assert_completed(job)
    log = installation.log_of(job.id)
    assert log.count("second 2\n") == 2 and "second 19\n" in log


def expire_token(installation: SignedInInstallation, job_id: str) -> None:
    with installation.database.write() as connection:
        for table in (program_tokens, job_tokens):
            connection.execute(update(table).where(table.c.job_id == job_id).values(expires_at=1))


def test_command_whose_token_expires_is_ended_with_the_message_of_the_api(installation: SignedInInstallation) -> None:
    job = installation.submit_command(PRINT_FOR_EVER)
    installation.wait_until_running(job)
    wait_until(lambda: "second 2" in installation.log_of(job.id), ENDS_WITHIN, lambda: installation.describe(job.ref))
    expire_token(installation, job.id)
    installation.assert_failed(job, ExitReason.SUPERVISOR_FAILED, "nothing can be stored any more, resume the job", "401")
    assert "second 2" in installation.log_of(job.id)


def test_training_whose_token_expires_fails_with_a_remedy_and_resumes(
    installation: SignedInInstallation, trainings: Trainings
) -> None:
    job = trainings.job("expired", nodes=1, processes=1, steps=MANY_STEPS)  # a single process computes 60 steps per second
    failures: list[dg.Failure] = []

    def supervise() -> None:
        try:
            with failure_with_reason():
                installation.compute.run(job, QUIET)
        except dg.Failure as failure:
            failures.append(failure)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    wait_until(lambda: b"step 15/" in installation.compute.read_log(job, 0), ENDS_WITHIN, lambda: installation.describe(job))
    expire_token(installation, job.id)
    supervisor.join(ENDS_WITHIN)
    assert failures, installation.describe(job)
    [failure] = failures
    assert failure.metadata[EXIT_REASON].value == ExitReason.SUPERVISOR_FAILED, failure
    assert "401" in str(failure.description)
    state = installation.state(job.id)
    assert state["reason"] == ExitReason.SUPERVISOR_FAILED and "401" in state["detail"]
    assert "step 1/" in installation.compute.read_log(job, 0).decode()
    installation.compute.acknowledge_end(job)  # as the supervisor does once Dagster has recorded it
    installation.compute.submit(job)
    installation.wait_for(job, Phase.SUCCEEDED)
    assert (trainings.trained(job).resumed_from or 0) >= 10


def test_job_beyond_a_zero_quota_waits_with_the_kueue_message_until_quota_is_added(
    installation: SignedInInstallation,
) -> None:
    set_gpu_quota(installation, 0)
    try:
        job = installation.submit_command(GREET, resources={"gpus": 1})
        installation.wait_for_words(job, "insufficient", "nvidia.com/gpu")
        state = installation.state(job.id)
        assert state["phase"] == "queued" and state["queue_position"] == 1
    finally:
        set_gpu_quota(installation, GPUS)
    installation.assert_completed(job)


def set_gpu_quota(installation: SignedInInstallation, gpus: int) -> None:
    groups = installation.cluster.get("clusterqueue", installation.name)["spec"]["resourceGroups"]
    for group in groups:
        for flavor in group["flavors"]:
            for resource in flavor["resources"]:
                if resource["name"] == "nvidia.com/gpu" and resource["nominalQuota"] in (str(GPUS), "0"):
                    resource["nominalQuota"] = str(gpus)
    patch = json.dumps({"spec": {"resourceGroups": groups}})
    installation.cluster.kubectl("patch", "clusterqueue", installation.name, "--type=merge", f"--patch={patch}")


def test_pods_of_a_failed_job_stay_for_a_time_and_hold_no_gpus(installation: SignedInInstallation, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    document = {"name": "kept", "command": ["python", "-c", FAIL], "resources": {"memory": "400Mi", "gpus": GPUS}}
    config.write_text(yaml.safe_dump(document))
    made = json.loads(installation.cli("job", "submit", "--config", str(config), "--keep-failed", "--json"))
    job = installation.supervise(made["id"])
    detail = installation.assert_failed(job, ExitReason.PROGRAM_ERROR, "exited with 3", "its pods are kept until")
    until = datetime.fromisoformat(detail.partition("kept until ")[2][:16] + "+00:00")
    describe, logs = (words.removeprefix("kubectl ").split() for words in detail.split("`")[1:4:2])
    assert "Exit Code:" in installation.cluster.kubectl(*describe)
    assert "the last words" in installation.cluster.kubectl(*logs)
    installation.assert_completed(installation.submit_command(GREET, resources={"gpus": GPUS}))
    selector = f"ml.hanzo.ai/job={installation.jobs.get(job.ref).name}"
    wait_until(
        lambda: not kept_objects(installation, selector),
        KEEP_MINUTES * 60 + 60,
        lambda: str(kept_objects(installation, selector)),
    )
    assert abs(datetime.now(until.tzinfo) - until).total_seconds() < 180


def kept_objects(installation: SignedInInstallation, selector: str) -> list[dict[str, Any]]:
    kinds = "jobsets,pods,configmaps,secrets"
    found: list[dict[str, Any]] = installation.cluster.get(
        kinds, f"--namespace={installation.name}", f"--selector={selector}"
    )["items"]
    return found


def test_hanging_rank_is_named_and_the_gang_resumes_from_its_checkpoint(
    installation: SignedInInstallation, trainings: Trainings
) -> None:
    job: Job = trainings.job("hangs", steps=FEW_STEPS)
    job = job.model_copy(update={"schedule": job.schedule.model_copy(update={"stall_limit": "30s"})})
    installation.compute.submit(job)
    installation.wait_for_step(job, 15)
    os.kill(find_process(installation, job, "recipes.train", RANK="1"), signal.SIGSTOP)
    installation.wait_for(job, Phase.SUCCEEDED)
    stalled, completed = installation.attempts.list(job)
    assert (stalled.reason, completed.reason) == (ExitReason.STALLED, ExitReason.COMPLETED)
    assert stalled.counted
    assert stalled.message.startswith("rank 1 of node 1 (") and "made no progress for 30s" in stalled.message
    assert (trainings.trained(job).resumed_from or 0) >= 10


def test_job_reports_that_it_waits_for_an_unavailable_admission_webhook(installation: SignedInInstallation) -> None:
    """The webhook is for JobSets, as those of JobSet and Kueue are.

    It is limited to this namespace, and its server does not respond.
    """
    rule = {"apiGroups": ["jobset.x-k8s.io"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["jobsets"]}
    webhook = {
        "name": "away.jobset.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "clientConfig": {"service": {"namespace": installation.name, "name": "away"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": installation.name}},
        "rules": [rule],
    }
    kind = "ValidatingWebhookConfiguration"
    configuration = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": installation.name}}
    installation.cluster.apply({**configuration, "webhooks": [webhook]})
    try:
        job = installation.submit_command(GREET)
        installation.wait_for_words(job, "its objects cannot be created, will retry", "failed calling webhook")
        assert installation.state(job.id)["phase"] == "queued"
    finally:
        installation.cluster.kubectl("delete", kind, installation.name)
    installation.assert_completed(job)
