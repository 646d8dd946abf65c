"""A command from its beginning to what it left, in one process of each node."""

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from recipes.command.end import killed_by, last_words
from recipes.command.folders import make_folders
from recipes.command.multi_node_publisher import Apart, Together
from recipes.command.nodes import Nodes
from recipes.command.process import Command
from recipes.command.snapshot_publisher import Saving
from recipes.command.snapshot_store import States
from recipes.command.storing import patiently
from recipes.command.workspace import VISIBLE, WITHOUT_GPU, check_is_there, environment, gpus_here
from recipes.contracts.command_job import Script
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Job, Result
from recipes.contracts.quantities import seconds_of
from recipes.counted import counted
from recipes.job_processes import NODE, end_processes
from recipes.platform_errors import reason_of_output
from recipes.runner import Failed, Preempted, Restart, say
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact, Manifest
from recipes.usage import Usage, folder_of, read_usage, write_usage

KIND = "checkpoints"


def command(job: Job, store: Store, work: Path) -> Result | None:
    """Run the command. Inputs: `code`, its source files, and `dataset`, each where there is one. Output: `checkpoints`.

    On several nodes it runs on each; what all of them leave is the job's.

    Raises:
        BadConfiguration: there is no such program or dataset.
        Restart: a signal ended the command.
        Failed: it ended with an error of its own.
        Preempted: the job was asked to stop, and the command has stopped.
    """
    script = Script.model_validate(job.parameters["script"])
    if left := end_processes(job.id, os.environ.get(NODE)):
        say(f"ended {counted(left, 'process')} of an earlier attempt")
    nodes = nodes_of(job, store, os.environ)
    states = States(store, job.outputs["checkpoints"], job.checkpoint.keep_last)
    folders = make_folders(job, store, states, work, nodes)
    here = gpus_here(os.environ.get(VISIBLE))
    env = environment(job, script, folders, os.environ, has_gpus=here > 0)
    if str(WITHOUT_GPU) in env["PYTHONPATH"]:
        say("no GPU here: where the command's torch names CUDA and NCCL, it gets the processor and Gloo")
    check_is_there(script.command[0], folders.code, env["PATH"])
    before, began, gpus = read_usage(store, folder_of(job)), time.monotonic(), min(job.hardware.gpus, here) * nodes.size

    def used() -> Usage:
        seconds = time.monotonic() - began
        return Usage(seconds=before.seconds + seconds, gpus=gpus, gpu_seconds=before.gpu_seconds + seconds * gpus)

    def account() -> None:
        if nodes.leads:
            write_usage(store, folder_of(job), used())

    interval = seconds_of(job.checkpoint.interval)
    of_command = (folders.checkpoints, states, made_of(job, script), interval, account)
    saving = Saving(*of_command) if nodes.size == 1 else Together(*of_command, nodes, folders.borrowed)
    saving.begin()
    running = Command(script.command, folders.code, env)
    say(f"$ {shlex.join(script.command)}")
    code = running.run()
    usage = used()
    stopped = running.asked_to_stop  # later, what it did is done: asked as its files were stored, it did all once more
    by_signal = None if stopped else killed_by(code, running.errors)

    def leave() -> dict[str, Artifact]:
        saving.end(lambda: code != 0 or running.asked_to_stop)
        if nodes.leads:
            write_usage(store, folder_of(job), usage)
        left = saving.publish()
        return {"checkpoints": left} if left else {}

    # Also of one that is to start again: it may do so on another machine, which has nothing of this one's.
    artifacts: dict[str, Artifact] = {}
    not_stored = ""
    try:
        artifacts = patiently(leave, folders.checkpoints, lambda: running.asked_to_stop)
    except (Apart, StoreFull, StoreUnavailable) as error:
        not_stored = f", and what it left in {folders.checkpoints} could not be stored: {error}"
    if by_signal is not None:
        raise Restart(f"the command was killed ({by_signal}){not_stored}", ExitReason.KILLED)
    if stopped:
        raise Preempted(f"the command was asked to stop, and has ended{not_stored}")
    if code != 0:
        said = last_words(running.errors) or "it wrote nothing to stderr"
        raise Failed(f"the command exited with {code}: {said}{not_stored}", reason_of_output(said))
    if not_stored:
        raise Preempted(f"the job was asked to stop, the command has ended{not_stored}")
    if not nodes.leads:
        return None
    return Result(work_digest=job.work_digest, artifacts=artifacts, facts=usage.model_dump(mode="json"))


def nodes_of(job: Job, store: Store, environment: Mapping[str, str]) -> Nodes:
    size = job.distributed.num_nodes if job.distributed else 1
    return Nodes(store, job.outputs["checkpoints"], int(environment.get(NODE, "0")) if size > 1 else 0, size)


def made_of(job: Job, script: Script) -> Manifest:
    """What a state of the command's checkpoints says of where it comes from, without its files."""
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()}
    return Manifest(kind=KIND, files=(), inputs=inputs, facts={"command": list(script.command)})
