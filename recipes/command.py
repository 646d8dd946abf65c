"""The program `command`: a script of the user's own, as its job file says (rows G2, H6).

It is given a folder with its source files, one for checkpoints that outlives a restart and the machine, its dataset, and the
tracking run, all by variables of its environment. What ends by a signal is started again; a script's own error is not.
"""

import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import FrameType

from recipes.buckets import StoreFull, StoreUnavailable
from recipes.command_end import Tail, killed_by, last_words
from recipes.command_job import Script
from recipes.command_look import Stamp
from recipes.command_nodes import Nodes
from recipes.command_saving import Saving
from recipes.command_states import States, copy_files
from recipes.command_together import Apart, Together, begin_together
from recipes.job_processes import MARK, end_processes
from recipes.machine import read_machine
from recipes.runner import Failed, Preempted, Restart, main, say
from recipes.schema import Artifact, BadConfiguration, Job, Manifest, Result, seconds_of
from recipes.store import Store
from recipes.usage import Usage, folder_of, read_usage, write_usage

PIPE_SECONDS = 10.0
"""How long the last words of a command are waited for: who hides from us may hold its pipe for ever."""
STORE_PAUSES = (1.0, 5.0, 30.0, 60.0, 300.0, 600.0)
"""Seconds between two attempts to store what a command left; the last for all that follow."""
STOPPING_PAUSE = 10.0
GRACE_SECONDS = 240.0
"""Of one that is asked to stop, such as at its deadline: how long it still tries. A pod is killed after 300."""
WITHOUT_GPU = Path(__file__).parent / "without_gpu"
KIND = "checkpoints"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1")
"""What a command may say of it in place of the GPUs that its job has."""


@dataclass(frozen=True)
class Folders:
    """What the command finds on this machine."""

    code: Path
    checkpoints: Path
    dataset: Path | None
    borrowed: Mapping[str, Stamp]
    """What of the checkpoints is the first node's."""


class Command:
    """The command as a process in a group of its own, which dies with this one. SIGTERM is handed on to it."""

    def __init__(self, words: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> None:
        self.asked_to_stop = False
        self._words, self._folder, self._env = words, folder, env
        self._process: Popen[bytes] | None = None
        self._tail = Tail()
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> int:
        """Its exit code, negative where a signal ended it."""
        if self.asked_to_stop:
            raise Preempted("asked to stop before the command began")
        self._process = process = start(self._words, self._folder, self._env)
        if self.asked_to_stop:  # while it was started
            self._send(signal.SIGTERM)
        assert process.stderr is not None
        reader = threading.Thread(target=self._tail.follow, args=(process.stderr.fileno(), sys.stderr.fileno()), daemon=True)
        reader.start()
        try:
            return process.wait()
        finally:
            end_processes(self._env[MARK])  # whoever still writes to the pipe, too
            reader.join(PIPE_SECONDS)

    @property
    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.text

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


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
    if left := end_processes(job.id):
        say(f"ended {left} processes of an earlier attempt")
    nodes = nodes_of(job, store, os.environ)
    folders = make_folders(job, store, work, nodes)
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
    of_command = (folders.checkpoints, states_of(job, store), made_of(job, script), interval, account)
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
        raise Restart(f"the command was killed ({by_signal}){not_stored}")
    if stopped:
        raise Preempted(f"the command was asked to stop, and has ended{not_stored}")
    if code != 0:
        said = last_words(running.errors) or "it wrote nothing to stderr"
        raise Failed(f"the command exited with {code}: {said}{not_stored}")
    if not_stored:
        raise Preempted(f"the job was asked to stop, the command has ended{not_stored}")
    if not nodes.leads:
        return None
    return Result(work_digest=job.work_digest, artifacts=artifacts, facts=usage.model_dump(mode="json"))


def patiently(
    leave: Callable[[], dict[str, Artifact]], checkpoints: Path, asked_to_stop: Callable[[], bool]
) -> dict[str, Artifact]:
    """Store what a command left that has ended. Without that it would do all it did once more, or have done it for nothing.

    It is tried until the job is asked to stop, which it is at its deadline at the latest, and then for its grace.

    Raises:
        StoreFull, StoreUnavailable: the grace is over; what the command left stays on this machine.
        Apart: other nodes have not ended.
    """
    ends = math.inf
    pauses = chain(STORE_PAUSES, repeat(STORE_PAUSES[-1]))
    while True:
        try:
            return leave()
        except (StoreFull, StoreUnavailable) as error:
            stopping = asked_to_stop()
            ends = min(ends, time.monotonic() + GRACE_SECONDS) if stopping else ends
            if time.monotonic() >= ends:
                raise
            seconds = min(next(pauses), STOPPING_PAUSE if stopping else math.inf)
            say(f"what the command left in {checkpoints} cannot be stored, and is tried again in {seconds:g} s: {error}")
        until = time.monotonic() + seconds
        while time.monotonic() < until and asked_to_stop() == stopping:  # who is asked meanwhile tries at once
            time.sleep(min(seconds, 1.0))


def start(words: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> Popen[bytes]:
    """The command, its stdout the log itself. Should this process be killed, the kernel ends it."""
    setpriv = shutil.which("setpriv")  # where an image has none, its container ends with this process
    leave_with_parent = (setpriv, "--pdeathsig=KILL", "--") if setpriv else ()
    return Popen([*leave_with_parent, *words], cwd=folder, env=env, stdin=DEVNULL, stderr=PIPE, start_new_session=True)


def nodes_of(job: Job, store: Store, environment: Mapping[str, str]) -> Nodes:
    size = job.distributed.num_nodes if job.distributed else 1
    return Nodes(store, job.outputs["checkpoints"], int(environment.get("PET_NODE_RANK", "0")) if size > 1 else 0, size)


def make_folders(job: Job, store: Store, work: Path, nodes: Nodes) -> Folders:
    """The folders, with the source files written anew: whatever else the command left there stays."""
    cache = Path(job.cache_dir)
    code, checkpoints = work / "code", work / "checkpoints"
    for folder in (code, checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    if source := job.inputs.get("code"):
        fetched = store.fetch(source, cache)
        for record in store.manifest(source).files:
            target = code / record.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fetched / record.path, target)
            if target.read_bytes().startswith(b"#!"):
                target.chmod(0o755)
    borrowed = bring_back(job, store, cache, checkpoints, nodes)
    asked, dataset = job.parameters.get("dataset"), job.inputs.get("dataset")
    if asked and dataset is None:
        raise BadConfiguration(f"there is no dataset {asked}, which storage.datasets names: see `hanzo-ml dataset list`")
    own = own_copy(store, dataset, cache, work / "dataset") if dataset else None
    return Folders(code, checkpoints, own, borrowed)


def bring_back(job: Job, store: Store, cache: Path, checkpoints: Path, nodes: Nodes) -> Mapping[str, Stamp]:
    """What an earlier attempt published, where this machine has nothing that the command left: the job has moved here.

    Of several nodes each has its part of one state. Returns what of it is the first's.
    """
    if nodes.size > 1:
        return begin_together(states_of(job, store), nodes, cache, checkpoints)
    if not any(checkpoints.iterdir()) and (kept := states_of(job, store).bring(cache, checkpoints)):
        say(f"checkpoints: {kept.size_bytes} bytes brought back from {kept.uri}")
    return {}


def states_of(job: Job, store: Store) -> States:
    return States(store, job.outputs["checkpoints"], job.checkpoint.keep_last)


def made_of(job: Job, script: Script) -> Manifest:
    """What a state of the command's checkpoints says of where it comes from, without its files."""
    inputs = {role: artifact.digest for role, artifact in job.inputs.items()}
    return Manifest(kind=KIND, files=(), inputs=inputs, facts={"command": list(script.command)})


def own_copy(store: Store, dataset: Artifact, cache: Path, target: Path) -> Path:
    """The dataset as a folder that is not the store's own: a script writes where it likes."""
    folder = store.fetch(dataset, cache)
    if folder != store.local_path(dataset.uri):
        return folder
    copy_files(store, dataset, folder, target)  # others may lie there too: a prepared version's splits have their tokens
    return target


def environment(
    job: Job, script: Script, folders: Folders, inherited: Mapping[str, str], *, has_gpus: bool
) -> dict[str, str]:
    """The variables of the command: what it gives itself, below what the job knows better."""
    assert job.tracking is not None
    env = {**inherited, "PYTHONUNBUFFERED": "1", **script.env}
    if VISIBLE in inherited and env[VISIBLE] not in NO_GPU:  # others are other jobs'
        env[VISIBLE] = inherited[VISIBLE]
    env |= {
        "HANZO_ML_TRACKING_URI": job.tracking.uri,
        "MLFLOW_TRACKING_URI": job.tracking.uri,
        "HANZO_ML_EXPERIMENT": str(job.parameters["experiment"]),
        "HANZO_ML_RUN_ID": job.tracking.run_id,
        "MLFLOW_RUN_ID": job.tracking.run_id,
        "HANZO_ML_CHECKPOINTS": str(folders.checkpoints),
        "HANZO_ML_CHECKPOINT_INTERVAL": f"{seconds_of(job.checkpoint.interval):.0f}",
        MARK: job.id,
    }
    if folders.dataset is not None:
        env["HANZO_ML_DATASETS"] = str(folders.dataset)
    env["PATH"] = joined(str(Path(sys.executable).parent), env.get("PATH", os.defpath))
    sees_gpus = has_gpus and env.get(VISIBLE) not in NO_GPU
    env["PYTHONPATH"] = joined("" if sees_gpus else str(WITHOUT_GPU), env.get("PYTHONPATH", ""))
    return env


def gpus_here(visible: str | None) -> int:
    """How many there are for the job, which has those that its environment names."""
    if visible is None:
        return len(read_machine().gpus)
    return 0 if visible in NO_GPU else len(visible.split(","))


def joined(first: str, rest: str) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def check_is_there(program: str, folder: Path, path: str) -> None:
    """Raises BadConfiguration where a command's first word names nothing that can be run."""
    place = str(folder / program) if "/" in program else program
    if shutil.which(place, path=path) is None:
        raise BadConfiguration(f"there is no program '{program}' here: correct `command`, or install it beside Hanzo ML")


if __name__ == "__main__":
    main(command)
