"""The launcher as real processes: end, stop and kill of a gang's program."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import OUT_OF_MEMORY_FILE
from recipes.launch.child_process import descendants
from recipes.storage.artifact_store import Store
from tests.recipes.launch.launched_gang import LONG, ClusterJob, LaunchedGang
from tests.support.recipes.command_program import CommandJobs
from tests.support.server_process import ServerProcess

Launch = Callable[..., LaunchedGang]

COUNT = """
import os, time
print("begins on", os.environ["PET_NODE_RANK"], "of attempt", os.environ["HANZO_ML_ATTEMPT"], flush=True)
while True:
    time.sleep(0.1)
"""
ON_TERM_SAVE = """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(os.environ["HANZO_ML_CHECKPOINTS"], "saved").write_text("state")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begins", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def launch(tmp_path: Path, server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Return a function that starts a gang running a script on every node."""
    gangs: list[LaunchedGang] = []

    def start(script: str, *, nodes: int = 2, again: ClusterJob | None = None, **options: Any) -> LaunchedGang:
        cluster_job = again or make_job(tmp_path, server, script, nodes)
        gangs.append(LaunchedGang(cluster_job, tmp_path / f"gang-{len(gangs)}", nodes=nodes, **options))
        return gangs[-1]

    yield start
    for gang in gangs:
        gang.kill_all()


def make_job(folder: Path, server: ServerProcess, script: str, nodes: int) -> ClusterJob:
    shape = {"num_nodes": nodes, "gpus_per_node": 1, "backend": "gloo"}
    job = CommandJobs(folder).job(script, distributed=shape)
    return ClusterJob(job.model_copy(update={"id": f"{job.id}{folder.name[-20:]}"}), server)


def reason(gang: LaunchedGang, attempt: int = 1) -> ExitReason | None:
    return gang.cluster_job.attempts()[attempt - 1].reason


def test_gang_completes_and_leaves_logs_nodes_and_exit_reason(launch: Launch) -> None:
    gang = launch("import os; print('hello from', os.environ['PET_NODE_RANK'])")
    assert gang.wait() == [0, 0], gang.describe()
    (attempt,) = gang.cluster_job.attempts()
    assert (attempt.reason, attempt.nodes, attempt.gpus) == (ExitReason.COMPLETED, ["machine-0", "machine-1"], [[], []])
    for node in (0, 1):
        assert f"hello from {node}" in gang.cluster_job.log(1, node)
        assert f"hello from {node}" in gang.output(node), "kubectl logs shows nothing"
    assert gang.cluster_job.exit_document(1).reason is ExitReason.COMPLETED


def test_error_on_one_node_ends_the_others(launch: Launch) -> None:
    gang = launch("""
import os, sys, time
print("begins", flush=True)
time.sleep(1)
if os.environ["PET_NODE_RANK"] == "1":
    raise ValueError("no such column")
time.sleep(600)
""")
    assert gang.wait() == [1, 1], gang.describe()
    (attempt,) = gang.cluster_job.attempts()
    assert attempt.reason is ExitReason.PROGRAM_ERROR
    assert "node 1: the command exited with 1: ValueError: no such column" in attempt.message


def test_sigterm_to_one_pod_makes_all_save(launch: Launch) -> None:
    gang = launch(ON_TERM_SAVE)
    gang.wait_for_output("begins")
    gang.pods[1].send_signal(signal.SIGTERM)
    assert gang.wait() == [143, 143], gang.describe()
    assert reason(gang) is ExitReason.PREEMPTED
    assert all("saved" in gang.cluster_job.log(1, node) for node in (0, 1))


@pytest.mark.parametrize(("killed", "left"), [(1, 0), (0, 1)])
def test_lost_launcher_ends_the_gang_and_is_named(launch: Launch, killed: int, left: int) -> None:
    gang = launch(COUNT)
    gang.wait_for_output("begins on")
    gang.kill_launcher(killed)
    gang.wait_for(lambda: "the gang ends" in gang.output(left), left)
    gang.pods[left].send_signal(signal.SIGTERM)  # JobSet deletes the other pods as soon as one has failed
    assert gang.pods[left].wait(LONG) == 75, gang.describe()
    (attempt,) = gang.cluster_job.attempts()
    assert (attempt.reason, attempt.counted) == (ExitReason.NODE_LOST, False)
    assert f"node {killed} (" in attempt.message and "without a goodbye" in attempt.message
    assert gang.cluster_job.exit_document(1).reason is ExitReason.NODE_LOST


@pytest.mark.slow
def test_silent_launcher_is_lost_after_ten_seconds(launch: Launch) -> None:
    gang = launch(COUNT)
    gang.wait_for_output("begins on")
    gang.pods[1].send_signal(signal.SIGSTOP)
    assert gang.pods[0].wait(LONG) == 75, gang.describe()
    assert "node 1 (pod pod-1 on node machine-1) sent no heartbeat for 10 s" in gang.cluster_job.attempts()[0].message


@pytest.mark.slow
def test_killed_program_is_distinguished_from_its_consequences(launch: Launch) -> None:
    gang = launch(COUNT)
    gang.wait_for_output("begins on")
    (program,) = (pid for pid in descendants(gang.pods[1].pid) if is_program(pid))
    os.kill(program, signal.SIGKILL)
    assert gang.wait() == [75, 75], gang.describe()
    (attempt,) = gang.cluster_job.attempts()
    assert (attempt.reason, attempt.counted) == (ExitReason.KILLED, True)
    assert "node 1: the program was killed (SIGKILL)" in attempt.message


def is_program(process_id: int) -> bool:
    return b"recipes.command" in Path(f"/proc/{process_id}/cmdline").read_bytes()


HANG = """
import os, pathlib, time
rank = int(os.environ["PET_NODE_RANK"])
counts = pathlib.Path(os.environ["PROGRESS"].replace("RANK", str(rank)), f"{rank}.json")
counts.write_text('{"events": 3, "collectives": {"all": %d}}' % (9 - rank))
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_stalled_gang_ends_at_its_limit_naming_the_hanging_rank(
    launch: Launch, tmp_path: Path, server: ServerProcess
) -> None:
    cluster_job = make_job(tmp_path, server, HANG, 2)
    job = cluster_job.job
    cluster_job.job = job.model_copy(update={"schedule": job.schedule.model_copy(update={"stall_limit": "10s"})})
    folder = str(tmp_path / "gang-0" / "RANK" / "work" / "progress")
    gang = launch("", again=cluster_job, variables={"PROGRESS": folder})
    assert gang.wait() == [75, 75], gang.describe()
    (attempt,) = cluster_job.attempts()
    assert attempt.reason is ExitReason.STALLED and attempt.counted
    assert attempt.message.startswith("rank 1 of node 1 (pod pod-1 on node machine-1) made no progress for 10s")


def test_claim_and_exit_report_survive_an_api_outage(launch: Launch, server: ServerProcess) -> None:
    server.stop()
    gang = launch("import time; print('begins', flush=True); time.sleep(3)")
    try:
        gang.wait_for(lambda: "does not answer" in gang.output(0))
        server.start()
        gang.wait_for_output("begins")
        server.kill()
        gang.wait_for(lambda: gang.output(0).count("does not answer") == 2)
    finally:
        if not server.is_running:
            server.start()
    assert gang.wait() == [0, 0], gang.describe()
    assert reason(gang) is ExitReason.COMPLETED


def test_cancelled_job_gets_no_new_attempt(launch: Launch, tmp_path: Path, server: ServerProcess) -> None:
    cluster_job = make_job(tmp_path, server, COUNT, 2)
    cluster_job.set_row(wanted="cancel")
    gang = launch(COUNT, again=cluster_job)
    assert gang.pods[0].wait(LONG) == 1, gang.describe()
    assert "is cancelled or over" in gang.output(0)
    assert cluster_job.attempts() == []


ALLOCATE = """
import os, subprocess, sys
os.system(f"{sys.executable} -c 'x = bytearray(600 << 20)'")  # killed, which this process does not say
sys.exit(3)
"""


@pytest.fixture
def memory_cgroup(tmp_path: Path) -> Iterator[Path]:
    """Create a memory cgroup with a limit."""
    parent = next((Path(path) for path in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup") if os.access(path, os.W_OK)), None)
    if parent is None:
        pytest.skip("no cgroup can be made here: it takes root and a writable /sys/fs/cgroup")
    folder = parent / f"hanzo-ml-test-{os.getpid()}"
    try:
        folder.mkdir()
        version_1 = folder / "memory.limit_in_bytes"
        (version_1 if version_1.exists() else folder / "memory.max").write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def test_memory_kill_of_a_child_process_is_out_of_memory(launch: Launch, memory_cgroup: Path) -> None:
    """Regression: the kernel kills a worker, and the program itself exits with another code."""
    enter = ["sh", "-c", f'echo $$ > {memory_cgroup}/cgroup.procs && exec "$@"', "sh"]
    gang = launch(ALLOCATE, nodes=1, prefix=enter)
    assert gang.wait() == [75], gang.describe()
    (attempt,) = gang.cluster_job.attempts()
    assert (attempt.reason, attempt.counted) == (ExitReason.OOM_KILLED, True)
    assert "memory limit of 0.39 GiB, peak 0.39 GiB" in attempt.message

    following = launch(ALLOCATE, nodes=1, again=gang.cluster_job)
    following.wait()
    assert (following.folder / "0" / "work" / OUT_OF_MEMORY_FILE).exists(), "the next attempt would need as much memory"


def test_foreign_pod_with_another_token_cannot_join(launch: Launch) -> None:
    gang = launch("print('hello')", ranks=[0])
    foreign = LaunchedGang(gang.cluster_job, gang.folder / "foreign", ranks=[], variables={"MLFLOW_TRACKING_TOKEN": "other"})
    foreign.heartbeat_port = gang.heartbeat_port
    stranger = foreign.start(1)
    try:
        gang.wait_for_output("")
        own = gang.start(1)
        gang.pods[1] = own
        assert gang.wait() == [0, 0], gang.describe()
        assert stranger.poll() is None, "it waits for a first node of its own"
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.slow
def test_log_survives_a_store_outage(launch: Launch, tmp_path: Path) -> None:
    gang = launch("import time\nfor number in range(12):\n  print('line', number, flush=True); time.sleep(1)", nodes=1)
    gang.wait_for_output("line 1")
    store = Store(gang.cluster_job.job.store)
    root = Path(store.address.root.removeprefix("file://"))
    root.rename(root.with_name("away"))
    gang.wait_for_output("line 9")
    root.with_name("away").rename(root)
    assert gang.wait() == [0], gang.describe()
    log = gang.cluster_job.log(1)
    assert all(f"line {number}\n" in log for number in range(12))
