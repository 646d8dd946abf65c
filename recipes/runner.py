"""Start and end of every program.

Read the job, store the result, report the exit reason. A program that ends by itself without a result writes its exit reason
to `exit.json`; if it is killed, the supervisor does that. The exit code follows from the reason: 0 with a result, 78 bad
configuration (never restarted), 143 preempted after a checkpoint, 75 for other reasons to restart, 1 for any other error.
"""

import atexit
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.contracts.job import EXIT_FILE, BadConfiguration, Job, Result
from recipes.extras import failed_import
from recipes.machine import read_machine
from recipes.platform_errors import classify_error, classify_output
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.buckets import NO_SPACE_SUFFIX, StoreFull, StoreRefuses, StoreUnavailable, find_unmounted_bucket

ProgramFunction = Callable[[Job, Store, Path], Result | None]
"""A program; in a distributed job only the leader returns the result."""

RESTARTING = "starting again"
STORE_FAILED = f"{RESTARTING}: the object store"
STDERR = 2
EXIT_SECONDS = 120
"""How long the interpreter may take to exit: threads of libraries have kept finished programs alive."""
RESERVE_FILE, RESERVE_BYTES = "exit.reserve", 16_384
DISK_MESSAGES = {
    ExitReason.STORAGE_FULL: "no space left for {}: free some space",
    ExitReason.STORAGE_READ_ONLY: (
        "the file system of {} is read-only, perhaps because of disk errors: check the disk and remount it"
    ),
}
"""Why a program could not write, and what to do; `{}` is the path."""

ANSI_COLOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Preempted(Exception):
    """The program received a stop request and saved its state; it can resume."""


class Restart(Exception):
    """Restart the program: it has recorded how to proceed differently, or its child was killed."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.RESTART_REQUESTED) -> None:
        super().__init__(message)
        self.reason = reason


class ProgramFailed(Exception):
    """What the program ran has failed by itself; a restart would not help."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.PROGRAM_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


def log_line(message: str) -> None:
    """Write a line to the job's log, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def clean_line(message: str) -> str:
    """Clean a message of colours, and of characters that databases cannot store or terminals interpret."""
    return CONTROL_CHARACTERS.sub("\ufffd", " ".join(ANSI_COLOR.sub("", message).split()))


def main(program: ProgramFunction) -> None:
    """Run `program` on the job file named on the command line, then exit."""
    # the launcher requests stack dumps before it ends a program that hangs
    faulthandler.register(signal.SIGUSR1, file=STDERR)
    enable_garbage_collection()
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    work = Path(job.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    store = Store(job.store)
    reserve = reserve_exit_space(work)

    def fail(message: str, reason: ExitReason) -> NoReturn:
        """Exit with a reason.

        In `exit.json` for the supervisor, and as the last log line for users. During an outage of the store, a program may
        report it as a missing file.
        """
        if not reason.restarts and find_unmounted_bucket(job.store):
            message, reason = f"{STORE_FAILED} is away: {message}", ExitReason.STORAGE_UNAVAILABLE
        line = clean_line(message)
        print(f"error: {line}", file=sys.stderr, flush=True)
        reserve.unlink(missing_ok=True)
        write_exit(work / EXIT_FILE, ExitDocument(code=reason.exit_code, message=line, reason=reason))
        exit_process(reason.exit_code)

    try:
        result = program(job, store, work)
        if result:
            result = result.model_copy(update={"machine": read_machine()})
            store.put_bytes(job.result_uri, result.model_dump_json(indent=1).encode())
    except (BadConfiguration, BrokenArtifact) as error:
        fail(str(error), ExitReason.BAD_CONFIGURATION)
    except Preempted as error:
        fail(f"preempted: {error}", ExitReason.PREEMPTED)
    except Restart as error:
        fail(f"{RESTARTING}: {error}", error.reason)
    except ProgramFailed as error:
        fail(str(error), error.reason)
    except StoreRefuses as error:
        fail(f"{STORE_FAILED} refuses: {error}", ExitReason.STORAGE_DENIED)
    except StoreUnavailable as error:
        traceback.print_exc()
        fail(f"{STORE_FAILED} does not answer, or refuses: {error}", ExitReason.STORAGE_UNAVAILABLE)
    except StoreFull as error:
        reason, place = ExitReason.STORAGE_FULL, str(error).removesuffix(NO_SPACE_SUFFIX)
    except SystemExit as error:
        # Raised by a library or a custom objective. Without an exit document it would count as killed, and be restarted.
        traceback.print_exc()
        fail(f"something called sys.exit: {error}", classify_output(str(error)))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (problem := failed_import(error, f"the program {job.program}")):
            fail(problem, ExitReason.BAD_CONFIGURATION)
        reason, place = classify_error(error), str(getattr(error, "filename", None) or work)
        if reason not in DISK_MESSAGES:
            traceback.print_exc()
            fail(f"{type(error).__name__}: {error}", reason)
    else:
        reserve.unlink(missing_ok=True)
        exit_process(0)
    # Only now: the error's frames keep a half-written file open, and with it the space for `exit.json`.
    fail(f"{DISK_MESSAGES[reason].format(place)}, then retry; nothing saved so far is lost", reason)


def reserve_exit_space(work: Path) -> Path:
    """Reserve disk space for the exit document, in case the program fills the disk."""
    reserve = work / RESERVE_FILE
    with suppress(OSError):  # it is full already
        reserve.write_bytes(bytes(RESERVE_BYTES))
    return reserve


def write_exit(path: Path, document: ExitDocument) -> None:
    """Write the exit document atomically.

    The first of several processes wins, as the others fail because of it. On a full disk a file may be created without
    content. The empty file is kept: it shows that the program ended by itself instead of being killed.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(document.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(scratch, path)
        except FileExistsError:
            if not path.stat().st_size:
                os.replace(scratch, path)
        except OSError:  # the file system does not support links
            os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            path.touch()
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def enable_garbage_collection() -> None:
    """Enable garbage collection, excluding imported objects: scanning them repeatedly takes half a second."""
    gc.freeze()
    gc.enable()


def exit_process(code: int) -> NoReturn:
    """Exit like multiprocessing's children: join threads and run atexit, but skip the interpreter's finalization.

    During finalization a thread in native code, such as gloo's after its last collective, that returns to Python aborts the
    process: a node of a successful run appeared to have crashed, and the others waited for it.

    A watchdog ends a program that does not exit, because it would keep its lock, and its successor would wait forever. Its
    result or `exit.json` counts more than its exit code; the log contains the stacks of its threads.
    """
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone, or the disk is full
            stream.flush()
    os._exit(code)
