"""The program `command` under LocalCompute, with real processes: start, end, kill and stop."""

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from recipes import machine
from recipes.command import program, workspace
from recipes.command.workspace import copy_dataset
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration, Job, StoreAddress
from recipes.contracts.results import Usage, read_usage, result_folder, write_usage
from recipes.job_processes import JOB_ID_VARIABLE, belongs_to_job, find_job_processes, kill_job_processes
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreFull, StoreUnavailable
from recipes.storage.manifest import Artifact
from resources.compute.base import JobFailed
from resources.compute.local.backend import LocalCompute
from resources.settings.settings import Settings
from tests.support.recipes.command_program import ID, ROOT, CommandJobs, commands, compute, until

__all__ = ["commands", "compute"]


def test_a_script_runs_with_its_files_its_variables_and_its_folders(compute: LocalCompute, commands: CommandJobs) -> None:
    script = """
import json, os, sys
import beside.words
json.dump(dict(os.environ), open(os.environ["HANZO_ML_CHECKPOINTS"] + "/env", "w"))
print(beside.words.HELLO, os.environ["COLOUR"])
"""
    job = commands.job(
        script,
        env={"COLOUR": "grey", "HANZO_ML_EXPERIMENT": "doors", "HANZO_ML_TRACKING_URI": "http://ml.hanzo.svc:8057"},
        files={"main.py": script, "beside/words.py": "HELLO = 'hello'"},
        storage={"checkpoints": "s3://hanzo-ml/checkpoints/doors/"},
        schedule={"checkpoint_interval": "20m"},
    )
    result = compute.run(job, commands.follower)
    assert commands.said() == ["hello grey"]
    made = result.artifacts["checkpoints"]
    assert made.uri.startswith(f"s3://hanzo-ml/checkpoints/doors/{ID}/state-1-")
    assert commands.store.manifest(made).inputs == {"code": job.inputs["code"].digest}
    env = json.loads(commands.store.get_bytes(f"{made.uri}/env"))
    expected = {
        "HANZO_ML_TRACKING_URI": "http://127.0.0.1:9",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "HANZO_ML_EXPERIMENT": "doors",
        "HANZO_ML_RUN_ID": ID,
        "MLFLOW_RUN_ID": ID,
        "HANZO_ML_CHECKPOINT_INTERVAL": "1200",
        JOB_ID_VARIABLE: ID,
    }
    assert {name: env.get(name) for name in expected} == expected
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert Settings.load(env), "the job's variables contain no unknown setting"
    assert "HANZO_ML_DATASETS" not in env and "HF_HUB_OFFLINE" not in env


def test_script_output_is_logged_while_running(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job("import os, time\nprint('out')\nwhile not os.path.exists('go'): time.sleep(0.01)\n")
    runner = threading.Thread(target=compute.run, args=(job, commands.follower))
    runner.start()
    until("its first line", lambda: "out" in commands.lines)
    (Path(job.work_dir) / "code" / "go").touch()
    runner.join(60)
    assert not runner.is_alive()


@pytest.mark.parametrize(
    ("script", "message", "reason"),
    [
        (
            "import sys\nprint('x', file=sys.stderr)\nraise ValueError('no such column')",
            "exited with 1: ValueError: no ",
            ExitReason.PROGRAM_ERROR,
        ),
        (
            "import sys\nprint('it is too late', file=sys.stderr)\nsys.exit(3)",
            "exited with 3: it is too late",
            ExitReason.PROGRAM_ERROR,
        ),
        ("raise SystemExit(4)", "exited with 4: it wrote nothing to stderr", ExitReason.PROGRAM_ERROR),
        ("raise MemoryError('9 GB')", "exited with 1: MemoryError: 9 GB", ExitReason.OUT_OF_MEMORY),
    ],
)
def test_an_error_of_the_script_is_not_tried_again_and_is_the_reason(
    compute: LocalCompute, commands: CommandJobs, script: str, message: str, reason: ExitReason
) -> None:
    job = commands.job(f"print('begun')\n{script}")
    with pytest.raises(JobFailed, match="failed after 1 attempt") as failed:
        compute.run(job, commands.follower)
    assert message in str(failed.value) and failed.value.reason is reason
    assert commands.said().count("begun") == 1
    assert "recipes/command/" not in "\n".join(commands.lines), "no traceback of ours"


def test_unpublishable_file_is_logged(compute: LocalCompute, commands: CommandJobs) -> None:
    left = "import os\nos.mkfifo(os.environ['HANZO_ML_CHECKPOINTS'] + '/pipe')"
    assert compute.run(commands.job(left), commands.follower).artifacts == {}
    assert any("pipe is not published: it is not a file" in line for line in commands.lines)


def test_failed_script_keeps_its_files_and_adds_its_usage(compute: LocalCompute, commands: CommandJobs) -> None:
    left = "import os\nopen(os.environ['HANZO_ML_CHECKPOINTS'] + '/step-7', 'w').write('x')\nraise ValueError('late')"
    job = commands.job(left)
    write_usage(commands.store, result_folder(job), Usage(seconds=1000.0))
    with pytest.raises(JobFailed):
        compute.run(job, commands.follower)
    assert commands.state() is not None
    assert read_usage(commands.store, result_folder(job)).seconds > 1000


def test_killed_command_restarts_with_its_checkpoints(compute: LocalCompute, commands: CommandJobs) -> None:
    script = """
import os, signal
kept = os.path.join(os.environ["HANZO_ML_CHECKPOINTS"], "step")
if not os.path.exists(kept):
    open(kept, "w").write("1")
    os.kill(os.getpid(), signal.SIGKILL)
print("went on from", open(kept).read())
"""
    compute.run(commands.job(script), commands.follower)
    assert commands.said()[-1] == "went on from 1"


def test_visible_gpus_are_counted_from_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine with three. Regression: a command without visible GPUs was charged for them."""
    monkeypatch.setattr(machine, "NVIDIA_FOLDER", tmp_path)
    for index in "123":
        (tmp_path / index).mkdir()
        (tmp_path / index / "information").write_text("Model: A100")
    visible = {None: 3, "": 0, "-1": 0, "1": 1, "0,GPU-1f": 2}
    assert {given: workspace.count_visible_gpus(given) for given in visible} == visible


class Leaving:
    """Files of a command, a store that succeeds after some tries, and a stop request."""

    def __init__(self, problems: list[Exception], stop_at: int | None = None) -> None:
        self.problems, self.stop_at = problems, stop_at
        self.tries = 0

    def leave(self) -> dict[str, Artifact]:
        self.tries += 1
        if self.problems:
            raise self.problems.pop(0)
        return {}

    def stop_requested(self) -> bool:
        return self.stop_at is not None and self.tries >= self.stop_at


AWAY, FULL = StoreUnavailable("no answer"), StoreFull("no space is left")


@pytest.mark.parametrize("problem", [AWAY, FULL], ids=["away", "full"])
def test_files_of_an_ended_command_are_stored_after_any_outage(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: finished commands failed after a 17 minute outage, or immediately if storage was full."""
    monkeypatch.setattr(program, "STORE_RETRY_SECONDS", (0.0, 0.0, 0.0))
    leaving = Leaving([problem] * 20)
    assert program.retry_until_stored(leaving.leave, tmp_path, leaving.stop_requested) == {}
    assert capsys.readouterr().out.count(f"cannot store the files that the command left in {tmp_path}, retrying") == 20


@pytest.mark.parametrize(("grace", "tries"), [(600.0, 9), (0.0, 3)])
def test_stopping_command_retries_storing_only_within_its_grace_period(
    grace: float, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "STORE_RETRY_SECONDS", (0.0, 0.0, 3600.0))
    monkeypatch.setattr(program, "STOPPING_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(program, "STOPPING_GRACE_SECONDS", grace)
    leaving = Leaving([FULL] * 8, stop_at=3)
    if grace:
        assert program.retry_until_stored(leaving.leave, tmp_path, leaving.stop_requested) == {}
    else:
        with pytest.raises(StoreFull, match="no space is left"):
            program.retry_until_stored(leaving.leave, tmp_path, leaving.stop_requested)
    assert leaving.tries == tries


STAYING = """
import os, pathlib, signal
kept = pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"])
print("found", sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()))
(kept / "deep").mkdir(exist_ok=True)
(kept / "deep" / "step").write_text("1")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_command_restores_its_files_on_another_machine(commands: CommandJobs, broken: bool) -> None:
    """If the stored state is corrupt, nothing is restored and it is published again."""
    once = LocalCompute(commands.jobs, source=ROOT, max_restarts=0, poll_seconds=0.02)
    job = commands.job(STAYING)
    with pytest.raises(JobFailed, match=r"killed \(SIGKILL\)") as failed:
        once.run(job, commands.follower)
    assert failed.value.reason is ExitReason.KILLED
    state = commands.state()
    assert state is not None
    if broken:
        commands.store.put_bytes(f"{state.uri}/deep/step", b"half")
    with pytest.raises(JobFailed, match=r"killed \(SIGKILL\)"):
        run_elsewhere(job, commands, max_restarts=0)
    found = [line for line in commands.said() if line.startswith("found")]
    assert found == ["found []", "found []" if broken else "found ['deep/step']"]
    words = "which are incomplete" if broken else "1 byte restored from"
    assert any(words in line for line in commands.lines)
    again = commands.state()
    assert again is not None
    assert commands.store.get_bytes(f"{again.uri}/deep/step") == b"1"


def run_elsewhere(job: Job, commands: CommandJobs, max_restarts: int = 2) -> None:
    """Run the job on another machine, which has none of the first one's files."""
    other = LocalCompute(commands.folder / "elsewhere", source=ROOT, max_restarts=max_restarts, poll_seconds=0.02)
    other.run(job.model_copy(update={"cache_dir": str(commands.folder / "other-cache")}), commands.follower)


COUNTING = """
import os, pathlib, time
kept = pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"])
step = int((kept / "step").read_text()) if (kept / "step").exists() else 0
print("goes on from", step)
if step == 0:
    (kept / "step.tmp").write_text("7")
    (kept / "step.tmp").rename(kept / "step")
    time.sleep(600)
"""


def test_checkpoints_of_a_running_command_survive_its_machine(compute: LocalCompute, commands: CommandJobs) -> None:
    """Regression: checkpoints were published only at the end, so losing a node lost all."""
    job = commands.job(COUNTING, schedule={"checkpoint_interval": "0.2s"})
    compute.submit(job)
    until("what it left in the store", commands.state)
    os.kill(int((Path(job.work_dir) / "pid.json").read_text()), signal.SIGKILL)
    until("the end of all that ran there", lambda: kill_job_processes(ID) == 0 and not find_job_processes(ID))
    shutil.rmtree(job.work_dir)
    assert read_usage(commands.store, result_folder(job)).seconds > 0, "what it took is known too"
    run_elsewhere(job, commands)
    assert commands.said() == ["goes on from 7"]


def test_checkpoints_published_by_an_older_release_are_restored(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job(COUNTING)
    (commands.folder / "left").mkdir()
    (commands.folder / "left" / "step").write_text("5")
    commands.store.publish(commands.folder / "left", job.outputs["checkpoints"], "checkpoints")
    compute.run(job, commands.follower)
    assert commands.said() == ["goes on from 5"]


def test_repeatedly_killed_command_fails_naming_the_signal(compute: LocalCompute, commands: CommandJobs) -> None:
    with pytest.raises(JobFailed, match=r"after 3 attempts: .*killed \(SIGKILL\)"):
        compute.run(commands.job("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"), commands.follower)


WITH_A_CHILD = """
import os, subprocess, sys, time
code = "import time; print('child', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
starts = os.path.join(os.environ["HANZO_ML_CHECKPOINTS"], "starts")
open(starts, "a").write("x")
print("begun")
while len(open(starts).read()) < 2: time.sleep(0.01)
"""


def test_processes_of_a_killed_attempt_end_before_the_next(compute: LocalCompute, commands: CommandJobs) -> None:
    """Killing the program ends its command, and detached children before the next attempt."""
    job = commands.job(WITH_A_CHILD)
    runner = threading.Thread(target=compute.run, args=(job, commands.follower))
    runner.start()
    until("the child", lambda: "child" in commands.lines and "begun" in commands.lines)
    before = find_job_processes(ID)
    assert len(before) == 2
    os.kill(int((Path(job.work_dir) / "pid.json").read_text()), signal.SIGKILL)
    runner.join(60)
    assert not runner.is_alive()
    assert commands.said().count("begun") == 2
    assert not [process for process in before if belongs_to_job(process, ID)]


def test_resubmitting_an_unfollowed_job_ends_its_old_processes(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job(WITH_A_CHILD)
    compute.submit(job)
    until("the child", lambda: "child" in compute.read_lines(job, 0)[0] and "begun" in compute.read_lines(job, 0)[0])
    before = find_job_processes(ID)
    os.kill(int((Path(job.work_dir) / "pid.json").read_text()), signal.SIGKILL)
    until("its end", lambda: not compute.has_processes(job))
    compute.submit(job)
    until("the next", lambda: "of an earlier attempt" in compute.read_lines(job, 0)[0])
    assert not [process for process in before if belongs_to_job(process, ID)]
    compute.cancel(job)


def test_cancelled_command_gets_sigterm_and_leaves_no_process(compute: LocalCompute, commands: CommandJobs) -> None:
    script = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def leave(*_):
    print("saving")
    open(os.environ["HANZO_ML_CHECKPOINTS"] + "/step-7", "w").write("x")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("begun")
while True: time.sleep(0.01)
"""
    job = commands.job(script)
    compute.submit(job)
    until("its first line", lambda: "begun" in compute.read_lines(job, 0)[0])
    compute.cancel(job)
    assert "saving" in compute.read_lines(job, 0)[0]
    assert compute.result(job) is None
    assert find_job_processes(ID) == []
    assert commands.state() is not None, "what it saved is published"


STORE_GOES_AWAY = """
import os, pathlib
(pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"]) / "step").write_text("7")
objects = pathlib.Path(os.environ["OBJECTS"])
objects.rename(objects.with_name("away"))
objects.write_text("no folder")
print("done")
"""


def test_command_stopped_while_storing_its_result_completes(compute: LocalCompute, commands: CommandJobs) -> None:
    """The work is done: the command neither restarts nor loses its files."""
    objects = commands.folder / "objects"
    job = commands.job(STORE_GOES_AWAY, env={"OBJECTS": str(objects)})
    compute.submit(job)
    until("a try that failed", lambda: "retrying in" in compute.read_lines(job, 0)[0])
    os.kill(int((Path(job.work_dir) / "pid.json").read_text()), signal.SIGTERM)
    objects.unlink()
    objects.with_name("away").rename(objects)
    result = until("its result", lambda: compute.result(job))
    assert commands.store.get_bytes(f"{result.artifacts['checkpoints'].uri}/step") == b"7"
    assert compute.read_lines(job, 0)[0].count("done") == 1


@pytest.mark.requirement("J3")
def test_command_ignoring_sigterm_is_killed_after_its_grace_period(commands: CommandJobs) -> None:
    compute = LocalCompute(commands.jobs, source=ROOT, grace_seconds=0.5, poll_seconds=0.02)
    job = commands.job("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('begun')\ntime.sleep(600)")
    compute.submit(job)
    until("its first line", lambda: "begun" in compute.read_lines(job, 0)[0])
    compute.cancel(job)
    assert find_job_processes(ID) == []


def test_command_exceeding_max_duration_is_ended_with_the_reason(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job("import time\ntime.sleep(600)", schedule={"max_duration": "1s"})
    with pytest.raises(JobFailed, match=r"exceeded schedule.max_duration \(1s\): .* increase the limit"):
        compute.run(job, commands.follower)


def test_missing_program_is_refused_by_name(compute: LocalCompute, commands: CommandJobs) -> None:
    with pytest.raises(BadConfiguration, match="program 'trian' was not found"):
        compute.run(commands.job("", command=["trian"]), commands.follower)


def test_missing_dataset_is_refused_by_name(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job("", storage={"datasets": "s3://hanzo-ml/datasets/nobody/3/"})
    with pytest.raises(BadConfiguration, match="names dataset nobody@3, which does not exist"):
        compute.run(job, commands.follower)


def test_script_with_shebang_is_executable(compute: LocalCompute, commands: CommandJobs) -> None:
    compute.run(
        commands.job("", command=["./go.sh", "far"], files={"go.sh": "#!/bin/sh\necho $1 away\n"}), commands.follower
    )
    assert commands.said() == ["far away"]


def test_torchrun_without_options_starts_the_processes_of_the_job_shape(
    compute: LocalCompute, commands: CommandJobs
) -> None:
    shape = {"num_nodes": 1, "gpus_per_node": 3}
    words = ["torchrun", "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]
    compute.run(commands.job("", command=words, distributed=shape), commands.follower)
    assert sorted(line for line in commands.said() if line.startswith("rank")) == [f"rank {rank} of 3" for rank in range(3)]


def test_multi_node_command_is_refused_on_one_machine(compute: LocalCompute, commands: CommandJobs) -> None:
    job = commands.job("", distributed={"strategy": "fsdp", "num_nodes": 4, "gpus_per_node": 8})
    with pytest.raises(BadConfiguration, match=r"4 nodes, this machine is one: set distributed.num_nodes to 1"):
        compute.run(job, commands.follower)


def test_command_gets_a_copy_of_only_its_dataset(tmp_path: Path) -> None:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets={"datasets": "d"}))
    (tmp_path / "made" / "train").mkdir(parents=True)
    (tmp_path / "made" / "train" / "train-00000.jsonl").write_text("{}\n")
    dataset = store.publish(tmp_path / "made", "s3://hanzo-ml/datasets/d/1/all/records", "dataset")
    store.put_bytes(f"{dataset.uri}/train/train-00000.arrow", b"tokens")
    for _ in range(2):  # the second time as after a restart
        copy = copy_dataset(store, dataset, tmp_path / "cache", tmp_path / "copy")
    assert [path.relative_to(copy).as_posix() for path in copy.rglob("*.*")] == ["train/train-00000.jsonl"]
