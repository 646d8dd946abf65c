"""The first process of every pod on a cluster: `python -m recipes.launcher JOB_FILE`.

A container runtime knows one process and its exit code. This process adds what a gang needs:

- It claims the number of the attempt, so that pods of an earlier attempt, which may still run on a node that the cluster
  has lost, can no longer commit anything.
- It starts the program (directly or under torchrun) once all nodes have joined, and uploads its output in segments, because
  the log of a deleted pod is lost.
- It watches the other nodes. A rank that waits in a collective for a lost node would hold its GPUs for hours; here it ends
  within seconds, and the exit message names the node. If a training makes no progress for the job's stall limit, the
  message names the rank that the others wait for.
- It makes the whole gang save when one pod receives a stop request: none of them could save alone.
- It decides on one exit reason for the gang, even if the program was killed before it could write one, reports it to the
  API, and exits with its code. Unfinished work never exits with 0.
  the API, and exits with its code. Unfinished work never exits with 0.

It imports no torch: it stays resident next to the program in the memory of its container.
"""

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from recipes.contracts.exit_reason import ExitDocument, ExitReason, read_exit_document
from recipes.contracts.job import EXIT_FILE, FAILED_FILE, OUT_OF_MEMORY_FILE, Job, Result
from recipes.launch.attempt_api import ApiRefused, ApiUnavailable, AttemptApi, ClaimedAttempt
from recipes.launch.cgroup_memory import describe_kill, read_memory_counters
from recipes.launch.child_process import ChildProcess
from recipes.launch.command import program_command, program_environment
from recipes.launch.coordinator import Coordinator
from recipes.launch.exit_outcome import ProgramEnd, classify_end, preempted
from recipes.launch.gang import LOST_END_SECONDS, Gang, GangEnded
from recipes.launch.gang_connection import MAX_MESSAGE_CHARACTERS
from recipes.launch.gpus import read_gpu_uuids
from recipes.launch.log_segments import LogSpool, LogUploader
from recipes.launch.member import Member
from recipes.launch.pod import RENDEZVOUS_SECONDS, Pod
from recipes.launch.rank_progress import PROGRESS_FOLDER, read_progress
from recipes.launch.stall_watch import PERIOD_SECONDS
from recipes.platform_errors import classify_error
from recipes.storage import uris
from recipes.storage.artifact_store import Store
from recipes.storage.buckets import StoreRefuses
from recipes.storage.signed_bucket import ATTEMPT_VARIABLE

SPOOL_FOLDER = "log_segments"
FAILURE_POLL_SECONDS = 1.0
RESULT_SECONDS = 600.0
"""How long to retry checking in the store that a program that exited with 0 has left its result."""
RESULT_PAUSE_SECONDS = 2.0
REPORT_SECONDS = 600.0
"""How long the last log segments and the exit report are retried; after that only the exit code is reported."""
LOG_FIRST_SECONDS = 60.0
"""How long the exit report waits for the end of the log, which users read because of the report."""
REPORT_SHARE = 2 / 3
"""Share of the remaining grace period, once the program has stopped, for reporting; a pod that exceeds it is killed."""

TERMINATION_MESSAGE = Path("/dev/termination-log")
MAX_TERMINATION_CHARACTERS = 800
"""Limit of the message: the kubelet passes on 4096 bytes, and a truncated document cannot be parsed."""
DISK_REASONS = (ExitReason.STORAGE_FULL, ExitReason.STORAGE_READ_ONLY)

T = TypeVar("T")


class Launcher:
    """One pod's part in an attempt."""

    def __init__(self, job: Job, job_file: Path, pod: Pod) -> None:
        self._job, self._job_file, self._pod = job, job_file, pod
        self._work = Path(job.work_dir)
        self._spool = LogSpool(self._work / SPOOL_FOLDER)
        self._api = AttemptApi(job, pod, self._spool.write_line)
        self._alone = pod.num_nodes == 1 or pod.shares_work(job)
        self._gang: Gang = (
            Coordinator(
                pod,
                1 if self._alone else pod.num_nodes,
                job.schedule.grace_seconds,
                job.schedule.stall_limit,
                self._spool.write_line,
            )
            if self._alone or pod.is_first
            else Member(pod, self._spool.write_line)
        )
        self._uploader: LogUploader | None = None
        self._attempt: ClaimedAttempt | None = None
        self._asked_to_stop_at: float | None = None
        self._refusal = ""

    async def run(self) -> ExitDocument:
        """Run the program to its end and report it.

        Returns the exit reason that the gang agreed on.
        """
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop)
        await self._gang.open()
        verdict = await self._gang.agree(shorten(await self._run_attempt()))
        await self._gang.close()
        await self._report(verdict)
        return verdict

    def _stop(self) -> None:
        if self._asked_to_stop_at is None:
            self._asked_to_stop_at = time.monotonic()
            self._spool.write_line(f"node {self._pod.node_rank} was asked to stop")
            self._gang.announce_stop(preempted=True)

    async def _run_attempt(self) -> ExitDocument | None:
        """Run the program and return how it ended; None if only because the gang ended."""
        try:
            gpus = await in_thread(read_gpu_uuids)
            if isinstance(self._gang, Coordinator):
                self._gang.set_attempt(await self._gang.wait_unless_ended(self._api.claim(gpus)))
                await self._gang.wait_unless_ended(asyncio.wait_for(self._gang.started.wait(), RENDEZVOUS_SECONDS))
            else:
                await self._gang.wait_unless_ended(self._gang.started.wait())
            self._attempt = self._gang.attempt.result()
            self._start_upload(self._attempt)
            registration = asyncio.create_task(self._register(self._attempt, gpus))
            try:
                return await self._run_program(self._attempt)
            finally:
                registration.cancel()
        except GangEnded:
            return preempted("asked to stop before the program started") if self._gang.is_preempted else None
        except ApiRefused as error:
            return ExitDocument(code=None, message=str(error), reason=error.reason)
        except ApiUnavailable as error:
            return ExitDocument(code=None, message=str(error), reason=ExitReason.RESTART_REQUESTED)
        except TimeoutError:
            assert isinstance(self._gang, Coordinator)
            missing = ", ".join(map(str, self._gang.missing_nodes()))
            message = f"of {self._pod.num_nodes} nodes, these were not there within {RENDEZVOUS_SECONDS} s: {missing}"
            return ExitDocument(code=None, message=message, reason=ExitReason.NODE_LOST)
        except Exception as error:  # without a report the other nodes would only see that this one is lost
            traceback.print_exc()
            reason = classify_error(error)
            reason = reason if reason in DISK_REASONS else ExitReason.SUPERVISOR_FAILED
            return ExitDocument(code=None, message=f"the launcher failed: {type(error).__name__}: {error}", reason=reason)

    def _start_upload(self, attempt: ClaimedAttempt) -> None:
        store = self._open_store(attempt)
        self._uploader = LogUploader(self._spool, store, f"{self._folder(attempt)}/logs/node-{self._pod.node_rank}")
        self._uploader.start()

    def _open_store(self, attempt: ClaimedAttempt) -> Store:
        """Open the job's store for this attempt."""
        return Store(self._job.store, {ATTEMPT_VARIABLE: str(attempt.number)})

    def _folder(self, attempt: ClaimedAttempt) -> str:
        return uris.attempt_folder(self._job.id, self._job.program, attempt.number)

    async def _register(self, attempt: ClaimedAttempt, gpus: list[str]) -> None:
        """Report where this node runs, without delaying the program; the first node's claim contains it."""
        if isinstance(self._gang, Coordinator):
            return
        try:
            await self._api.register_node(attempt.number, gpus)
        except (ApiRefused, ApiUnavailable) as error:
            self._spool.write_line(f"this node is not registered: {error}")

    async def _run_program(self, attempt: ClaimedAttempt) -> ExitDocument | None:
        for left in (EXIT_FILE, FAILED_FILE):
            (self._work / left).unlink(missing_ok=True)
        progress = self._work / PROGRESS_FOLDER
        progress.mkdir(exist_ok=True)
        if attempt.previous_reason == ExitReason.OOM_KILLED:
            (self._work / OUT_OF_MEMORY_FILE).touch()  # makes the program reduce its memory use
        before = read_memory_counters()
        command = program_command(self._job, self._pod, self._job_file)
        child = ChildProcess(command, program_environment(os.environ, attempt.number), self._spool)
        watches = [
            asyncio.create_task(watch)
            for watch in (
                self._end_with_gang(child),
                self._announce_failure(),
                self._report_progress(progress),
                self._end_when_refused(child),
            )
        ]
        code = await child.wait()
        for watch in watches:
            watch.cancel()
        if self._refusal:
            return ExitDocument(code=None, message=self._refusal, reason=ExitReason.SUPERVISOR_FAILED)
        memory = read_memory_counters()
        found = await self._has_result(attempt) if code == 0 and self._pod.is_first else True
        document = read_exit_document(self._work) if code != 0 else None
        if found is None:
            message = "the program exited with 0, and the object store does not say whether its result is there"
            document = ExitDocument(code=None, message=message, reason=ExitReason.STORAGE_UNAVAILABLE)
        return classify_end(
            ProgramEnd(
                code,
                document,
                memory_kill=describe_kill(memory) if memory.kills > before.kills else None,
                was_asked_to_stop=self._gang.is_preempted,
                was_ended=child.was_ended,
                was_killed=child.was_killed,
                lacks_result=not found,
            )
        )

    async def _end_with_gang(self, child: ChildProcess) -> None:
        """Forward a stop of the gang.

        End the program when the gang ends or the grace period is over.
        """
        with suppress(GangEnded):
            await self._gang.wait_unless_ended(asyncio.Event().wait())
        if not self._gang.ending.is_set():
            child.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gang.ending.wait(), self._stop_seconds())
        await child.end(self._gang.end_seconds if self._gang.ending.is_set() else 0.0)

    def _stop_seconds(self) -> float:
        """Time for the program to save and stop."""
        return float(self._job.schedule.shutdown_seconds)

    async def _announce_failure(self) -> None:
        """Announce a failure early.

        A failed program may wait for the others, to store all their outputs.
        """
        if self._alone:
            return
        while not (self._work / FAILED_FILE).exists():
            await asyncio.sleep(FAILURE_POLL_SECONDS)
        self._gang.announce_stop(preempted=False)

    async def _end_when_refused(self, child: ChildProcess) -> None:
        """End a program whose output can no longer be stored.

        It would hold its GPUs in vain.
        """
        while self._uploader is None or not self._uploader.refusal:
            await asyncio.sleep(FAILURE_POLL_SECONDS)
        self._refusal = f"nothing can be stored any more, resume the job: {self._uploader.refusal}"
        await child.end(LOST_END_SECONDS)

    async def _report_progress(self, folder: Path) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            self._gang.report_progress(read_progress(folder, time.time()))

    async def _has_result(self, attempt: ClaimedAttempt) -> bool | None:
        """Return whether the store holds this job's result.

        None if the store does not answer for a long time.
        """
        store, until = self._open_store(attempt), time.monotonic() + RESULT_SECONDS
        while time.monotonic() < until:
            try:
                raw = await in_thread(store.get_bytes, self._job.result_uri)
                return Result.model_validate_json(raw).work_digest == self._job.work_digest
            except (FileNotFoundError, ValidationError):
                return False
            except Exception as error:  # after any error of the store the next attempt may succeed
                self._spool.write_line(f"the result cannot be read, retrying: {error}")
            await asyncio.sleep(RESULT_PAUSE_SECONDS)
        return None

    async def _report(self, verdict: ExitDocument) -> None:
        """Upload the rest of the log, then report and store the exit, with retries.

        It is the last chance.
        """
        if verdict.reason is not ExitReason.COMPLETED:
            self._spool.write_line(f"exit reason {verdict.reason}: {verdict.message}")
        attempt = self._attempt
        if attempt is None:
            return
        until = time.monotonic() + REPORT_SECONDS
        if self._uploader is not None:
            await in_thread(self._uploader.finish, min(LOG_FIRST_SECONDS, self._seconds_left(until)))
        if not (self._pod.shares_work(self._job) and leaves_attempt_open(self._pod, verdict)):
            await self._retry_until(until, lambda left: self._api.report_exit(attempt.number, verdict, left))
            if self._pod.is_first or (isinstance(self._gang, Member) and self._gang.lost_first):
                await self._retry_until(until, lambda left: self._store_exit(attempt, verdict))
        if self._uploader is not None:
            await in_thread(self._uploader.finish, self._seconds_left(until))

    async def _store_exit(self, attempt: ClaimedAttempt, verdict: ExitDocument) -> None:
        store, uri = self._open_store(attempt), f"{self._folder(attempt)}/{EXIT_FILE}"
        await in_thread(store.put_bytes, uri, verdict.model_dump_json().encode())

    async def _retry_until(self, until: float, call: Callable[[float], Awaitable[None]]) -> None:
        """Retry `call` until a deadline; a call that hangs is abandoned then."""
        while (left := self._seconds_left(until)) > 0:
            try:
                await asyncio.wait_for(call(left), left)
            except (ApiRefused, StoreRefuses) as error:  # a newer attempt is running, or a user ended the job
                write_line(f"the end of the attempt is not recorded: {error}")
                return
            except Exception as error:  # the exit code still reports the most important part
                write_line(f"the end of the attempt cannot be reported yet: {type(error).__name__}: {error}")
                await asyncio.sleep(RESULT_PAUSE_SECONDS)
            else:
                return

    def _seconds_left(self, until: float) -> float:
        """Return the time left until `until`, or less after a stop request.

        A pod is killed after its grace period.
        """
        if self._asked_to_stop_at is not None:
            schedule = self._job.schedule
            spare_seconds = (schedule.grace_seconds - schedule.shutdown_seconds) * REPORT_SHARE
            until = min(until, self._asked_to_stop_at + schedule.shutdown_seconds + spare_seconds)
        return max(0.0, until - time.monotonic())


def leaves_attempt_open(pod: Pod, verdict: ExitDocument) -> bool:
    """Return whether a job's other pods continue after this one; only without a gang."""
    return verdict.reason.restarts or (verdict.reason is ExitReason.COMPLETED and not pod.is_first)


def shorten(document: ExitDocument | None) -> ExitDocument | None:
    return document and document.model_copy(update={"message": document.message[:MAX_MESSAGE_CHARACTERS]})


def write_line(text: str) -> None:
    """Write to the container's own log, when the job's log may be closed already."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def in_thread(call: Callable[..., T], *arguments: object) -> T:
    """Like `asyncio.to_thread`, but in a daemon thread: a store may hang forever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = call(*arguments)
        except BaseException as error:
            finish(future.set_exception, error)
        else:
            finish(future.set_result, result)

    def finish(settle: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # the loop is closed and no longer waits
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))

    threading.Thread(target=work, daemon=True).start()
    return await future


def write_termination_message(verdict: ExitDocument, path: Path = TERMINATION_MESSAGE) -> None:
    """Report to the cluster why the pod ended.

    It is the only record if the API does not receive the report.
    """
    short = verdict.model_copy(update={"message": verdict.message[:MAX_TERMINATION_CHARACTERS]})
    with suppress(OSError):
        if path.exists():  # absent in local runs
            path.write_text(short.model_dump_json(), encoding="utf-8")


def main() -> None:
    job_file = Path(sys.argv[1])
    job = Job.model_validate_json(job_file.read_bytes())
    Path(job.work_dir).mkdir(parents=True, exist_ok=True)

    async def run() -> ExitDocument:
        return await Launcher(job, job_file, Pod.from_environment(os.environ)).run()

    verdict = asyncio.run(run())
    write_termination_message(verdict)
    sys.exit(verdict.reason.exit_code)


if __name__ == "__main__":
    main()
