"""LocalCompute with real processes: one process per job, and completed work is not repeated.

Most jobs run a program of a few lines in place of `prepare`. It uses the real runner, so it starts, ends and fails as
every program does. The last test runs a real program.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import (
    EXIT_FILE,
    OUT_OF_MEMORY_FILE,
    BadConfiguration,
    Distributed,
    Job,
    Program,
    Result,
    Schedule,
    StoreAddress,
)
from recipes.preparation.split_assignment import SPLITS
from recipes.storage.artifact_store import Store
from resources.compute import base
from resources.compute.base import Follower, JobFailed, JobRef, Observation, Phase, truncate_lines
from resources.compute.local import command, restarts
from resources.compute.local.backend import LocalCompute
from resources.compute.local.restarts import memory_kills
from resources.compute.local.work_folder import FAILED_ATTEMPTS_FILE, TIME_START_FILE
from resources.stack.detached_process import LOG_FILE, is_running, read_pid
from tests.recipes.json_lines import write_json_lines
from tests.support.resources.local_backend import BUCKETS, ROOT, Watcher, job_that, kill, let_finish, source, starts, until

__all__ = ["job_that", "source"]


@pytest.fixture
def compute(source: Path, tmp_path: Path) -> LocalCompute:
    return LocalCompute(tmp_path / "jobs", source=source, max_restarts=2, grace_seconds=20, poll_seconds=0.02)


def test_job_runs_to_its_result_and_its_log_is_followed_line_by_line(compute: LocalCompute, job_that: Any) -> None:
    seen = Watcher()
    result = compute.run(job_that("return"), seen.follower)
    assert result.metrics == {"starts": 1.0}
    assert [line.split(" ", 1)[1] for line in seen.lines] == ["begun", "finishing"]
    assert seen.phases[-1].phase is Phase.SUCCEEDED


def test_log_burst_is_truncated_to_its_last_lines_with_the_number_omitted() -> None:
    """Each line is a Dagster event: two seconds of output took an hour to deliver."""
    lines = [str(number) for number in range(100_000)]
    truncated = list(truncate_lines(lines, "job-1"))
    assert truncated == ["... 99,800 lines more: see `hanzo-ml job logs job-1`", *lines[-200:]]
    assert list(truncate_lines(lines[:200], "job-1")) == lines[:200]
    assert list(truncate_lines(["x" * 10_007], "job-1")) == ["x" * 10_000 + "... 7 characters more"]
    assert next(iter(truncate_lines(["1"] * 201, "job-1"))) == "... 1 line more: see `hanzo-ml job logs job-1`"


@pytest.mark.requirement("G5")
def test_job_beyond_its_max_duration_is_ended_and_may_get_more_time(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("term", schedule=Schedule(max_duration="4s"))
    seen = Watcher()
    with pytest.raises(JobFailed, match=r"it exceeded schedule.max_duration \(4s\): what it saved is kept") as failed:
        compute.run(job, seen.follower)
    assert failed.value.reason is ExitReason.TIMED_OUT
    assert "asked to stop" in seen.lines[-1] and starts(job) == 1
    assert not is_running(Path(job.work_dir))
    let_finish(job)
    more = job.model_copy(update={"schedule": Schedule(max_duration="1h")})
    assert compute.run(more, Watcher().follower).metrics == {"starts": 2.0}


@pytest.mark.parametrize("set_by", [7200.0, -7200.0], ids=["forward", "back"])
def test_clock_change_does_not_alter_the_remaining_time(
    compute: LocalCompute, job_that: Any, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    """Regression: a clock set two hours forward ended a job limited to one hour.

    Correcting the clock ended it once more.
    """
    job = job_that("wait", schedule=Schedule(max_duration="1h"))
    compute.submit(job)
    until("its start", lambda: starts(job))
    began, right = float((Path(job.work_dir) / TIME_START_FILE).read_text()), time.time
    for clock, wrong_by in ((right, 0.0), (lambda: right() + set_by, set_by), (lambda: right() + 5.0, 5.0)):
        monkeypatch.setattr(time, "time", clock)
        for _ in range(2):
            assert compute.observe(job) == Observation(Phase.RUNNING, 1)
        assert float((Path(job.work_dir) / TIME_START_FILE).read_text()) == pytest.approx(began + wrong_by, abs=60)
    let_finish(job)
    until("the result", lambda: compute.observe(job).phase is Phase.SUCCEEDED)


def test_clock_change_is_noticed_by_a_restarted_supervisor(
    source: Path, tmp_path: Path, job_that: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the clock offset was kept in memory only.

    A clock set while no supervisor ran ended the job.
    """

    def supervisor() -> LocalCompute:
        return LocalCompute(tmp_path / "jobs", source=source, max_restarts=2, grace_seconds=20, poll_seconds=0.02)

    job = job_that("wait", schedule=Schedule(max_duration="1h"))
    supervisor().submit(job)
    until("its start", lambda: starts(job))
    right = time.time
    for clock in (lambda: right() + 7200.0, right):
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", clock)
            assert [supervisor().observe(job) for _ in range(2)] == [Observation(Phase.RUNNING, 1)] * 2
    let_finish(job)
    until("the result", lambda: supervisor().observe(job).phase is Phase.SUCCEEDED)


def test_supervisor_needs_only_the_key_of_a_submitted_job(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("term")
    key = JobRef(job.id, job.program)
    assert (compute.has_processes(key), compute.log_size(key), compute.read_log(key, 0)) == (False, 0, b"")
    compute.submit(job)
    until("its first line", lambda: compute.read_lines(key, 0)[0].endswith("begun\n"))
    assert compute.has_processes(key) and compute.observe(key) == Observation(Phase.RUNNING, 1)
    assert not compute.has_processes(JobRef(job.id, Program.TRAIN)), "another program under the same id"
    text, offset = compute.read_lines(key, 0)
    assert compute.read_log(key, offset - 6, 5) == b"begun" and compute.log_size(key) == len(text)
    compute.cancel(key)
    assert not compute.has_processes(key)
    assert compute.observe(key).phase is Phase.RESTARTING
    compute.cancel(key)


def test_attaching_writes_no_file_and_a_changed_document_waits_for_the_next_attempt(
    compute: LocalCompute, job_that: Any
) -> None:
    job = job_that("wait", schedule=Schedule(max_duration="1h"))
    compute.submit(job)
    until("its start", lambda: starts(job))
    document = compute.folder(job) / "job.json"
    before = document.stat()
    compute.submit(job_that("wait", schedule=Schedule(max_duration="1h")))
    assert document.stat().st_ino == before.st_ino, "a full disk keeps nobody from attaching"
    compute.submit(job_that("return"))
    kill(job)
    until("the end", lambda: compute.observe(job).phase is Phase.SUCCEEDED)
    assert compute.result(job_that("return")) is not None and starts(job) == 2


def test_a_restart_gets_the_time_that_was_left(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("wait", schedule=Schedule(max_duration="1h"))
    work = Path(job.work_dir)
    compute.submit(job)
    until("the start", lambda: starts(job) == 1)
    began = float((work / TIME_START_FILE).read_text())
    kill(job)
    until("the restart", lambda: compute.observe(job) and starts(job) == 2)
    kill(job)
    assert float((work / TIME_START_FILE).read_text()) == began
    until("the end", lambda: not is_running(work))
    spoke = (work / LOG_FILE).stat().st_mtime
    compute.submit(job)  # as a supervisor does that was killed too
    assert 0 <= float((work / TIME_START_FILE).read_text()) - began <= time.time() - spoke
    kill(job)
    until("the end", lambda: not is_running(work))
    began = float((work / TIME_START_FILE).read_text())
    os.utime(work / LOG_FILE, (0, time.time() - 1000))
    compute.submit(job)  # as after 1000 s in which nothing ran
    assert float((work / TIME_START_FILE).read_text()) - began >= 1000
    let_finish(job)
    until("the result", lambda: compute.observe(job).phase is Phase.SUCCEEDED)


def test_completed_work_is_reused_and_changed_work_under_its_id_is_done(
    compute: LocalCompute, job_that: Any, tmp_path: Path
) -> None:
    job = job_that("return")
    first = compute.run(job, Watcher().follower)
    again = Watcher()
    assert compute.run(job_that("return", id="job-2"), again.follower) == first
    assert starts(job) == 1 and not (tmp_path / "jobs" / "job-2").exists()
    assert "was done before" in again.lines[0]
    changed = job_that("return", parameters={"do": "return", "seed": 2})
    assert compute.run(changed, Watcher().follower).work_digest == changed.work_digest != first.work_digest
    assert starts(job) == 2


def test_two_submissions_start_one_process(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("wait")
    compute.submit(job)
    compute.submit(job)
    until("its start", lambda: starts(job))
    compute.submit(job)
    assert compute.observe(job) == Observation(Phase.RUNNING, 1)
    let_finish(job)
    assert compute.run(job, Watcher().follower).metrics == {"starts": 1.0}


def test_a_submission_after_the_end_does_not_do_the_work_again(compute: LocalCompute, job_that: Any) -> None:
    """A supervisor may miss the result just before the program ends, and submit just after."""
    job = job_that("return")
    compute.run(job, Watcher().follower)
    compute.submit(job)
    until("the end", lambda: not is_running(Path(job.work_dir)))
    assert starts(job) == 1


def test_a_program_that_is_killed_starts_again(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("wait")
    compute.submit(job)
    until("its start", lambda: starts(job) == 1)
    kill(job)
    until("its end", lambda: not is_running(Path(job.work_dir)))
    assert compute.observe(job) == Observation(Phase.RESTARTING, 2, "killed", ExitReason.KILLED)
    let_finish(job)
    assert compute.run(job, Watcher().follower).metrics == {"starts": 2.0}


def test_program_killed_by_the_kernel_for_memory_is_restarted_with_that_reason(
    compute: LocalCompute, job_that: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such kills; here the counter was nonzero before."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 12\noom_kill 3\n")
    monkeypatch.setattr(restarts, "memory_kills", lambda: memory_kills(vmstat))
    job = job_that("wait")
    compute.submit(job)
    for counted, detail, reason in (
        (3, "killed", ExitReason.KILLED),
        (4, "killed by the kernel for lack of memory", ExitReason.OOM_KILLED),
        (4, "killed", ExitReason.KILLED),
    ):
        (Path(job.work_dir) / OUT_OF_MEMORY_FILE).unlink(missing_ok=True)
        until("its start", lambda: read_pid(Path(job.work_dir)))
        kill(job)
        until("its end", lambda: not is_running(Path(job.work_dir)))
        vmstat.write_text(f"nr_free_pages 12\noom_kill {counted}\n")
        seen = compute.observe(job)
        assert (seen.detail, seen.reason) == (detail, reason)
        assert (Path(job.work_dir) / OUT_OF_MEMORY_FILE).exists() == (reason is ExitReason.OOM_KILLED)


def wait_for_exit(job: Job, *, writing: dict[str, object] | None) -> None:
    """Kill the job's program and wait for its end.

    With `writing`, leave this exit document, as if the program had ended by itself.
    """
    work = Path(job.work_dir)
    until("its start", lambda: starts(job))
    kill(job)
    until("its end", lambda: not is_running(work))
    if writing is not None:
        (work / EXIT_FILE).write_text(json.dumps(writing))


@pytest.mark.parametrize("reason", ExitReason)
def test_only_the_reason_decides_whether_a_program_restarts(
    compute: LocalCompute, job_that: Any, reason: ExitReason
) -> None:
    """Neither the exit code nor the message does."""
    job = job_that("wait")
    compute.submit(job)
    wait_for_exit(job, writing={"code": 78, "message": "starting again: killed, no space left", "reason": reason})
    phase, attempt = (Phase.RESTARTING, 2) if reason.restarts else (Phase.FAILED, 1)
    seen = compute.observe(job)
    assert seen == Observation(phase, attempt, "starting again: killed, no space left", reason)
    assert int((Path(job.work_dir) / FAILED_ATTEMPTS_FILE).read_text()) == (reason.restarts and reason.counts)
    compute.cancel(job)


@pytest.mark.parametrize(
    ("document", "phase", "reason"),
    [
        ({"code": 75, "message": "starting again: on with half"}, Phase.RESTARTING, ExitReason.RESTART_REQUESTED),
        ({"code": 143, "message": "preempted: checkpoint 1"}, Phase.RESTARTING, ExitReason.PREEMPTED),
        ({"code": 1, "message": "no space left for /w: free some"}, Phase.FAILED, ExitReason.STORAGE_FULL),
        ({"code": 78, "message": "unknown recipe"}, Phase.FAILED, ExitReason.BAD_CONFIGURATION),
    ],
)
def test_document_of_a_program_of_an_older_release_is_classified_by_its_code_and_message(
    compute: LocalCompute, job_that: Any, document: dict[str, object], phase: Phase, reason: ExitReason
) -> None:
    """It was running while the control plane was upgraded."""
    job = job_that("wait")
    compute.submit(job)
    wait_for_exit(job, writing=document)
    seen = compute.observe(job)
    assert (seen.phase, seen.reason) == (phase, reason)
    compute.cancel(job)


def test_the_supervisor_writes_the_reason_of_a_killed_program(tmp_path: Path, source: Path, job_that: Any) -> None:
    compute = LocalCompute(tmp_path / "jobs", source=source, max_restarts=0, poll_seconds=0.02)
    job = job_that("die")
    with pytest.raises(JobFailed, match="killed") as failed:
        compute.run(job, Watcher().follower)
    assert failed.value.reason is ExitReason.KILLED
    written = json.loads((Path(job.work_dir) / EXIT_FILE).read_text())
    assert written == {"code": None, "message": "killed", "reason": "killed"}


def test_out_of_memory_kills_are_read_from_the_kernel() -> None:
    assert memory_kills() >= 0 and "oom_kill" in Path("/proc/vmstat").read_text()
    assert memory_kills(Path("/proc/none")) == 0


def test_preempted_program_that_saved_is_restarted(compute: LocalCompute, job_that: Any) -> None:
    seen = Watcher()
    assert compute.run(job_that("preempted once"), seen.follower).metrics == {"starts": 2.0}
    assert Observation(Phase.RESTARTING, 2, "preempted: checkpoint 1 holds everything", ExitReason.PREEMPTED) in seen.phases


def test_repeated_preemption_does_not_fail_the_job(compute: LocalCompute, job_that: Any) -> None:
    """A week on machines that are preempted twice a day."""
    assert compute.max_restarts == 2
    assert compute.run(job_that("preempted often"), Watcher().follower).metrics == {"starts": 6.0}


def test_program_that_requests_a_restart_is_restarted(compute: LocalCompute, job_that: Any) -> None:
    seen = Watcher()
    assert compute.run(job_that("restart once"), seen.follower).metrics == {"starts": 2.0}
    assert (
        Observation(Phase.RESTARTING, 2, "starting again: on with half the batch", ExitReason.RESTART_REQUESTED)
        in seen.phases
    )


def test_a_program_that_always_dies_fails_after_its_restarts(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("die")
    with pytest.raises(JobFailed, match="prepare job-1 failed after 3 attempts: killed"):
        compute.run(job, Watcher().follower)
    assert starts(job) == 3


@pytest.mark.parametrize("how", ["die four times", "save and die four times"])
def test_program_that_makes_progress_may_die_without_limit(compute: LocalCompute, job_that: Any, how: str) -> None:
    """Regression: a training that saved a checkpoint each time failed after twelve kills within minutes."""
    assert compute.max_restarts == 2
    assert compute.run(job_that(how), Watcher().follower).metrics == {"starts": 5.0}


def test_a_program_that_dies_at_the_same_step_again_and_again_fails(compute: LocalCompute, job_that: Any) -> None:
    """Earlier checkpoints and unfinished ones do not count as progress."""
    job = job_that("save once and die")
    with pytest.raises(JobFailed, match="prepare job-1 failed after 3 attempts: killed"):
        compute.run(job, Watcher().follower)
    assert starts(job) == 3


def test_bad_configuration_is_not_retried_and_keeps_its_message(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("bad")
    with pytest.raises(BadConfiguration, match=r"^no such thing: correct it$"):
        compute.run(job, Watcher().follower)
    assert starts(job) == 1
    assert compute.observe(job).phase is Phase.FAILED
    assert starts(job) == 1


def test_a_fault_of_the_program_is_not_tried_again(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("fault")
    with pytest.raises(JobFailed, match="ValueError: a fault"):
        compute.run(job, Watcher().follower)
    assert starts(job) == 1


def test_a_failed_job_can_be_run_again_once_its_cause_is_gone(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("bad")
    with pytest.raises(BadConfiguration):
        compute.run(job, Watcher().follower)
    corrected = job_that("return")
    assert compute.run(corrected, Watcher().follower).metrics == {"starts": 2.0}


SUPERVISOR = """
import sys
from pathlib import Path
from recipes.contracts.job import Job
from resources.compute.base import Follower
from resources.compute.local.backend import LocalCompute
job = Job.model_validate_json(Path(sys.argv[2]).read_bytes())
compute = LocalCompute(Path(sys.argv[3]), source=Path(sys.argv[1]), poll_seconds=0.02)
compute.run(job, Follower(lambda line: print(line, flush=True), lambda seen: None))
"""


def supervise(source: Path, job: Job, tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "given.json").write_text(job.model_dump_json())
    command = [sys.executable, "-c", SUPERVISOR, str(source), str(tmp_path / "given.json"), str(tmp_path / "jobs")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_supervisor_loses_nothing_and_the_next_one_attaches(
    compute: LocalCompute, job_that: Any, source: Path, tmp_path: Path
) -> None:
    job = job_that("wait")
    supervisor = supervise(source, job, tmp_path)
    until("the program's start", lambda: starts(job))
    supervisor.kill()
    supervisor.wait()
    assert is_running(Path(job.work_dir))
    let_finish(job)
    seen = Watcher()
    assert compute.run(job, seen.follower).metrics == {"starts": 1.0}
    assert all(observation.attempt <= 1 for observation in seen.phases)


def test_two_supervisors_follow_one_process(compute: LocalCompute, job_that: Any, source: Path, tmp_path: Path) -> None:
    job = job_that("wait")
    supervisors = [supervise(source, job, tmp_path) for _ in range(2)]
    until("the program's start", lambda: starts(job))
    let_finish(job)
    assert [supervisor.wait() for supervisor in supervisors] == [0, 0]
    assert compute.run(job, Watcher().follower).metrics == {"starts": 1.0}


def test_interrupt_of_the_follower_ends_the_job_with_a_catchable_signal(compute: LocalCompute, job_that: Any) -> None:
    """Dagster cancels runs this way."""
    job = job_that("term")

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute.run(job, Follower(interrupt, lambda seen: None))
    assert not is_running(Path(job.work_dir))
    assert "asked to stop" in compute.read_lines(job, 0)[0] or starts(job) == 1


def test_temporary_error_of_the_follower_does_not_end_the_job(
    compute: LocalCompute, job_that: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's database, the store or the metadata may be unavailable for a moment."""
    monkeypatch.setattr(base, "RETRY_SECONDS", 0.02)
    job, outages = job_that("wait"), 0

    def say(_: object) -> None:
        nonlocal outages
        if outages < 5:
            outages += 1
            raise ConnectionError("no database")

    follower = threading.Thread(target=compute.run, args=(job, Follower(say, say)))
    follower.start()
    until("the outage's end", lambda: outages == 5)
    let_finish(job)
    follower.join(60)
    assert not follower.is_alive()
    assert compute.run(job, Watcher().follower).metrics == {"starts": 1.0}


def test_long_outage_of_the_follower_ends_the_job(
    compute: LocalCompute, job_that: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(base, "STORE_OUTAGE_SECONDS", 0.1)
    job = job_that("term")

    def say(seen: Observation) -> None:
        raise ConnectionError("no database")

    with pytest.raises(ConnectionError):
        compute.run(job, Follower(lambda line: None, say))
    assert not is_running(Path(job.work_dir))


def test_log_is_read_in_whole_lines_from_the_last_offset(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("return")
    compute.run(job, Watcher().follower)
    text, offset = compute.read_lines(job, 0)
    with (Path(job.work_dir) / "log.txt").open("a") as log:
        log.write("half a li")
    assert compute.read_lines(job, offset) == ("", offset)
    with (Path(job.work_dir) / "log.txt").open("a") as log:
        log.write("ne\n")
    assert compute.read_lines(job, offset)[0] == "half a line\n"
    assert text.count("\n") == 2


def test_split_program_runs_and_its_result_is_reused(tmp_path: Path) -> None:
    address = StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS)
    raw = tmp_path / "raw"
    raw.mkdir()
    write_json_lines(raw / "records.jsonl", [{"instruction": f"Q {n}", "answer": f"A {n}"} for n in range(30)])
    job = Job(
        id="split",
        program=Program.SPLIT,
        inputs={"dataset": Store(address).publish(raw, "s3://hanzo-ml/datasets/d/1/records", "dataset")},
        outputs={name: f"s3://hanzo-ml/datasets/d/1/splits/{name}" for name in SPLITS},
        result_uri="s3://hanzo-ml/datasets/d/1/splits/result.json",
        store=address,
        cache_dir=str(tmp_path / "cache"),
    )
    compute = LocalCompute(tmp_path / "jobs", source=ROOT, poll_seconds=0.05)
    compute.submit(job)
    work = compute.folder(job)
    kill(job.model_copy(update={"work_dir": str(work)}))
    result = compute.run(job, Watcher().follower)
    assert result.metrics == {"train": 24.0, "validation": 3.0, "test": 3.0}
    written = (work / "attempt.json").read_text()
    assert isinstance(compute.run(job, Watcher().follower), Result)
    assert (work / "attempt.json").read_text() == written


def test_a_job_for_several_machines_is_refused_before_it_starts(compute: LocalCompute, job_that: Any) -> None:
    job = job_that("finish").model_copy(update={"distributed": Distributed(num_nodes=2, gpus_per_node=1)})
    with pytest.raises(BadConfiguration, match=r"this machine is one: set distributed\.num_nodes to 1"):
        compute.submit(job)
    assert not Path(job.work_dir).exists()


def test_torchrun_processes_get_almost_the_whole_grace_period(job_that: Any, tmp_path: Path) -> None:
    """By default torchrun kills them after 30 s, losing the checkpoint of the interrupted step."""
    assert LocalCompute(tmp_path, source=tmp_path).grace_seconds == 300
    alone = job_that("ends").model_copy(update={"program": Program.TRAIN})
    assert "recipes.torchrun" not in command.command(alone, tmp_path / "job.json")
    together = alone.model_copy(update={"distributed": Distributed(gpus_per_node=2)})
    for said in (
        [each for each in command.command(together, tmp_path / "job.json") if each.startswith("--shutdown-timeout=")],
        [f"--shutdown-timeout={command.COMMAND_ENVIRONMENT['PET_SHUTDOWN_TIMEOUT']}"],
    ):
        (flag,) = said
        assert 240 <= int(flag.removeprefix("--shutdown-timeout=")) < 300
