"""Jobs of every shape, and parts of their rendered objects."""

import sys
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from recipes.contracts.job import Distributed, Hardware, Job, Program, Schedule, StoreAddress, Tracking
from recipes.contracts.pod_settings import PodSettings, Toleration, VolumeClaim
from recipes.launch.command import program_command
from recipes.launch.pod import Pod
from recipes.storage.manifest import Artifact
from resources.compute.kubernetes.gang import plan_gang
from resources.compute.kubernetes.gangs import GANG_BACKENDS
from resources.compute.kubernetes.job_manifest import render
from resources.compute.kubernetes.pod_manifest import JOB_FILE
from resources.jobs.job_tokens import TOKEN_VARIABLE
from resources.settings.scheduler import Scheduler

GPUS = Hardware(gpus=8, gpu_type="nvidia-a100-80gb", memory="512Gi", cpu=64)
KUEUE = Scheduler()
PLAIN = Scheduler(gang_backend="indexed_job")
BACKENDS = {name: Scheduler.model_validate({"gang_backend": name}) for name in GANG_BACKENDS}
COMMAND: dict[str, JsonValue] = {
    "script": {"image": "me/mine:1", "command": ["torchrun", "--nproc_per_node=8", "train.py"], "env": {"COLOUR": "grey"}},
    "experiment": "doors",
    "dataset": None,
}


def a_job(**changed: Any) -> Job:
    job = Job(
        id="15b7c536c11a40a0938c709f2b8b4758",
        program=Program.TRAIN,
        inputs={"train": Artifact(kind="dataset", uri="s3://hanzo-ml/datasets/d/1", digest="0" * 64, size_bytes=1)},
        parameters={"steps": 1},
        result_uri="s3://hanzo-ml/runs/r/train.json",
        store=StoreAddress(root="http://minio:9000", buckets={"datasets": "d", "checkpoints": "c", "models": "m"}),
        work_dir="/home/somebody/jobs/r/train",
        cache_dir="/home/somebody/cache",
        tracking=Tracking(uri="http://ml.hanzo.svc:8057", run_id="r"),
        hardware=Hardware(cpu=2, memory="4Gi"),
    )
    return job.model_copy(update=changed)


JOBS = {
    "one node": a_job(),
    "four nodes of eight GPUs": a_job(hardware=GPUS, distributed=Distributed(strategy="fsdp", num_nodes=4)),
    "two processes of one node": a_job(distributed=Distributed(gpus_per_node=2, backend="gloo")),
    "no hardware at all": a_job(hardware=Hardware()),
    "an id of a user": a_job(id="My_Run.7"),
    "a command": a_job(program=Program.COMMAND, parameters=COMMAND),
    "a command on four nodes": a_job(
        program=Program.COMMAND, parameters=COMMAND, hardware=GPUS, distributed=Distributed(num_nodes=4)
    ),
    "a preparation in three pods": a_job(program=Program.PREPARE, tracking=None, pods=3),
    "everything that a pod may have": a_job(
        hardware=GPUS,
        schedule=Schedule(preemptible=True, grace_period="20m", retries=3, max_duration="90s"),
        env={"NCCL_DEBUG": "INFO", "NODE_RANK": "7", "HOME": "/data/home"},
        pod=PodSettings(
            secrets=("wandb", "hub-token"),
            image_pull_secrets=("registry",),
            node_selector={"topology.kubernetes.io/zone": "zone-a"},
            tolerations=(
                Toleration(key="example.com/spot", value="true", effect="NoSchedule"),
                Toleration(operator="Exists", effect="NoExecute"),
            ),
            volumes=(
                VolumeClaim(claim="datasets", path="/data"),
                VolumeClaim(claim="home.of-me", path="/data/home", sub_path="me", read_only=False),
                VolumeClaim(claim="datasets", path="/more", sub_path="more"),
            ),
        ),
    ),
}
DISTRIBUTED = JOBS["four nodes of eight GPUs"]


def of_kind(kind: str, job: Job, scheduler: Scheduler = KUEUE) -> dict[str, Any]:
    [found] = [item for item in render(job, scheduler) if item["kind"] == kind]
    return found


def child(job: Job, scheduler: Scheduler = KUEUE) -> dict[str, Any]:
    """Return the `spec` of the batch/v1 Job, wherever it is nested."""
    if scheduler.gang_backend == "indexed_job":
        return dict(of_kind("Job", job, scheduler)["spec"])
    return dict(of_kind("JobSet", job, scheduler)["spec"]["replicatedJobs"][0]["template"]["spec"])


def pod(job: Job, scheduler: Scheduler = KUEUE) -> dict[str, Any]:
    return dict(child(job, scheduler)["template"]["spec"])


def program(job: Job, scheduler: Scheduler = KUEUE) -> dict[str, Any]:
    [container] = pod(job, scheduler)["containers"]
    return dict(container)


def variables(job: Job, scheduler: Scheduler = KUEUE) -> dict[str, Any]:
    """Return the environment of the program's container: values or `valueFrom`."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in program(job, scheduler)["env"]}


def place(job: Job, scheduler: Scheduler = KUEUE, rank: int = 0) -> Pod:
    """Return the pod that a launcher parses from its environment.

    The variables that Kubernetes fills in have fixed values.
    """
    known = {"NODE_RANK": str(rank), "POD_UID": "uid", "POD_NAME": "pod", "NODE_NAME": "node", TOKEN_VARIABLE: "token"}
    return Pod.from_environment(variables(job, scheduler) | known)


def launched(job: Job, scheduler: Scheduler = KUEUE, rank: int = 0) -> list[str]:
    """Return the command line that a pod's launcher starts, from the interpreter onward."""
    command = program_command(plan_gang(job, scheduler).job, place(job, scheduler, rank), Path(JOB_FILE))
    return command[command.index(sys.executable) :]
