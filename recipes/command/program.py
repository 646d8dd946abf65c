"""Run a user's command from start to published checkpoints, on each node."""

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from pathlib import Path

from recipes.command.multi_node_publisher import MultiNodePublisher, NodesOutOfStep
from recipes.command.nodes import NodeGroup
from recipes.command.process import CommandProcess, failure_summary, killing_signal
from recipes.command.snapshot_publisher import SnapshotPublisher
from recipes.command.snapshot_store import SnapshotStore
from recipes.command.workspace import (
    CPU_FALLBACK_FOLDER,
    VISIBLE_GPUS,
    build_environment,
    check_program_exists,
    count_visible_gpus,
    prepare_folders,
)
from recipes.contracts.command_job import Script
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import FAILED_FILE, Job, Result
from recipes.contracts.quantities import parse_duration, pluralize
from recipes.contracts.results import Usage, read_usage, result_folder, write_usage
from recipes.job_processes import NODE_RANK_VARIABLE, kill_job_processes
from recipes.platform_errors import classify_output
from recipes.runner import Preempted, ProgramFailed, Restart, log_line
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact, Manifest

# The results of a command are stored however long the store is unavailable: otherwise all its work would be repeated.

STORE_RETRY_SECONDS = (1.0, 5.0, 30.0, 60.0, 300.0, 600.0)
"""Pauses between two attempts to store the results; the last one repeats."""
STOPPING_RETRY_SECONDS = 10.0
STOPPING_GRACE_SECONDS = 240.0
"""How long a job that was asked to stop, such as at its deadline, tries to store. A pod is killed after 300 s."""


def retry_until_stored(
    store_results: Callable[[], dict[str, Artifact]], checkpoints: Path, stop_requested: Callable[[], bool]
) -> dict[str, Artifact]:
    """Store the results of a command that has ended, with retries.

    Otherwise its work would be repeated or lost. Attempts continue until the job is asked to stop, at its deadline at the
    latest, and then for its grace period.

    Raises:
        StoreFull, StoreUnavailable: the grace period is over; the results stay on this machine.
        NodesOutOfStep: other nodes have not ended.
    """
    deadline = math.inf
    pauses = chain(STORE_RETRY_SECONDS, repeat(STORE_RETRY_SECONDS[-1]))
    while True:
        try:
            return store_results()
        except (StoreFull, StoreUnavailable) as error:
            stopping = stop_requested()
            deadline = min(deadline, time.monotonic() + STOPPING_GRACE_SECONDS) if stopping else deadline
            if time.monotonic() >= deadline:
                raise
            seconds = min(next(pauses), STOPPING_RETRY_SECONDS if stopping else math.inf)
            log_line(f"cannot store the files that the command left in {checkpoints}, retrying in {seconds:g} s: {error}")
        until = time.monotonic() + seconds
        # if the job is asked to stop meanwhile, try at once
        while time.monotonic() < until and stop_requested() == stopping:
            time.sleep(min(seconds, 1.0))


ARTIFACT_KIND = "checkpoints"


def command(job: Job, store: Store, work: Path) -> Result | None:
    """Run the command. Inputs: `code` (its source files) and `dataset`, both optional. Output: `checkpoints`.

    With several nodes it runs on each of them, and the output contains the files of all.

    Raises:
        BadConfiguration: there is no such program or dataset.
        Restart: a signal ended the command.
        ProgramFailed: the command ended with an error of its own.
        Preempted: the job was asked to stop, and the command has stopped.
    """
    script = Script.model_validate(job.parameters["script"])
    (work / FAILED_FILE).unlink(missing_ok=True)
    if left := kill_job_processes(job.id, os.environ.get(NODE_RANK_VARIABLE)):
        log_line(f"ended {pluralize(left, 'process')} of an earlier attempt")
    nodes = make_node_group(job, store, os.environ)
    states = SnapshotStore(store, job.outputs["checkpoints"], job.checkpoint.keep_last)
    folders = prepare_folders(job, store, states, work, nodes)
    num_gpus = count_visible_gpus(os.environ.get(VISIBLE_GPUS))
    env = build_environment(job, script, folders, os.environ, has_gpus=num_gpus > 0)
    if str(CPU_FALLBACK_FOLDER) in env["PYTHONPATH"]:
        log_line("no GPU on this machine: the command's torch uses the CPU and Gloo instead of CUDA and NCCL")
    check_program_exists(script.command[0], folders.code, env["PATH"])
    before, began, gpus = (
        read_usage(store, result_folder(job)),
        time.monotonic(),
        min(job.hardware.gpus, num_gpus) * nodes.size,
    )

    def measure_usage() -> Usage:
        seconds = time.monotonic() - began
        return Usage(seconds=before.seconds + seconds, gpus=gpus, gpu_seconds=before.gpu_seconds + seconds * gpus)

    def record_usage() -> None:
        if nodes.is_leader:
            write_usage(store, result_folder(job), measure_usage())

    interval = parse_duration(job.checkpoint.interval)
    publisher_arguments = (folders.checkpoints, states, snapshot_template(job, script), interval, record_usage)
    publisher = (
        SnapshotPublisher(*publisher_arguments)
        if nodes.size == 1
        else MultiNodePublisher(*publisher_arguments, nodes, folders.borrowed)
    )
    publisher.begin()
    running = CommandProcess(script.command, folders.code, env)
    log_line(f"$ {shlex.join(script.command)}")
    code = running.run()
    usage = measure_usage()
    # read now: if a stop requested during the upload counted, the completed work would be repeated
    stopped = running.stop_requested
    if code != 0 and not stopped:
        (work / FAILED_FILE).touch()
    signal_name = None if stopped else killing_signal(code, running.stderr_tail)

    def store_results() -> dict[str, Artifact]:
        publisher.end(lambda: code != 0 or running.stop_requested)
        if nodes.is_leader:
            write_usage(store, result_folder(job), usage)
        left = publisher.publish()
        return {"checkpoints": left} if left else {}

    # Also if the command is to be restarted: it may restart on another machine, which has none of this machine's files.
    artifacts: dict[str, Artifact] = {}
    not_stored = ""
    try:
        artifacts = retry_until_stored(store_results, folders.checkpoints, lambda: running.stop_requested)
    except (NodesOutOfStep, StoreFull, StoreUnavailable) as error:
        not_stored = f", and what it left in {folders.checkpoints} could not be stored: {error}"
    if signal_name is not None:
        raise Restart(f"the command was killed ({signal_name}){not_stored}", ExitReason.KILLED)
    if stopped:
        raise Preempted(f"the command was asked to stop, and has ended{not_stored}")
    if code != 0:
        summary = failure_summary(running.stderr_tail) or "it wrote nothing to stderr"
        raise ProgramFailed(f"the command exited with {code}: {summary}{not_stored}", classify_output(summary))
    if not_stored:
        raise Preempted(f"the job was asked to stop, the command has ended{not_stored}")
    if not nodes.is_leader:
        return None
    return Result(work_digest=job.work_digest, artifacts=artifacts, facts=usage.model_dump(mode="json"))


def make_node_group(job: Job, store: Store, environment: Mapping[str, str]) -> NodeGroup:
    size = job.distributed.num_nodes if job.distributed else 1
    return NodeGroup(
        store, job.outputs["checkpoints"], int(environment.get(NODE_RANK_VARIABLE, "0")) if size > 1 else 0, size
    )


def snapshot_template(job: Job, script: Script) -> Manifest:
    """Return the manifest of a checkpoints snapshot without its files: its inputs and command."""
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()}
    return Manifest(kind=ARTIFACT_KIND, files=(), inputs=inputs, facts={"command": list(script.command)})
