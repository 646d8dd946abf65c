"""How every program starts and ends: job file in, result into the object store, exit reason to the supervisor.

A program that ends by itself without a result writes its exit reason to `exit.json`; one that is killed cannot, and the
supervisor does it instead. The exit code follows from the reason: 0 with a result, 78 bad configuration (never restarted),
143 preempted after a checkpoint, 75 for other reasons to restart, 1 for any other error.
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
"""A program; of the processes of a distributed one, only the leader has the result."""

RESTARTING = "starting again"
STORE_FAILED = f"{RESTARTING}: the object store"
STDERR = 2
EXIT_SECONDS = 120
"""How long the interpreter may take to end: threads of libraries have kept programs alive that had done their work."""
RESERVE_FILE, RESERVE_BYTES = "exit.reserve", 16_384
DISK_MESSAGES = {
    ExitReason.STORAGE_FULL: "no space left for {}: free some space",
    ExitReason.STORAGE_READ_ONLY: (
        "the file system of {} is read-only, as the kernel makes one whose disk has errors: mount it for writing"
    ),
}
"""What kept a program from writing, and what to do about it; `{}` is the path."""

ANSI_COLOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Preempted(Exception):
    """The program was asked to stop, has saved what it had, and can go on from there."""


class Restart(Exception):
    """The program is to be started again: it has recorded what it will do differently, or what it ran was killed."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.RESTART_REQUESTED) -> None:
        super().__init__(message)
        self.reason = reason


class ProgramFailed(Exception):
    """What the program was to run failed by itself; a restart would not help."""

    def __init__(self, message: str, reason: ExitReason = ExitReason.PROGRAM_ERROR) -> None:
        super().__init__(message)
        self.reason = reason


def log_line(message: str) -> None:
    """One line of the job's log, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def clean_line(message: str) -> str:
    """A message without colours, and without what no database holds or a terminal acts on."""
    return CONTROL_CHARACTERS.sub("\ufffd", " ".join(ANSI_COLOR.sub("", message).split()))


def main(program: ProgramFunction) -> None:
    """Run `program` on the job file named on the command line, then exit."""
    faulthandler.register(signal.SIGUSR1, file=STDERR)  # the launcher asks for stacks before it ends a program that hangs
    enable_garbage_collection()
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    work = Path(job.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    store = Store(job.store)
    reserve = reserve_exit_space(work)

    def fail(message: str, reason: ExitReason) -> NoReturn:
        """Exit with a reason: in `exit.json` for the supervisor, and as the last line of the log for people.

        While the store is away, a program does not find what it reads there, and reports that in its own words.
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
        fail(f"{STORE_FAILED} gives no answer, or refuses: {error}", ExitReason.STORAGE_UNAVAILABLE)
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
    # Only after the error is gone: its frames hold the half-written file open, and with it the space for `exit.json`.
    fail(f"{DISK_MESSAGES[reason].format(place)}, then retry; nothing saved so far is lost", reason)


def reserve_exit_space(work: Path) -> Path:
    """Take the space that the exit document needs, so that a disk which the program fills has room for it."""
    reserve = work / RESERVE_FILE
    with suppress(OSError):  # it is full already
        reserve.write_bytes(bytes(RESERVE_BYTES))
    return reserve


def write_exit(path: Path, document: ExitDocument) -> None:
    """Write the exit document atomically; of several processes the first one's stays, since the others fail because of it.

    The disk may be full, and then a file gets a name but no content. Such an empty file is kept: it shows that the program
    ended by itself and was not killed.
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
        except OSError:  # of a file system without links
            os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            path.touch()
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def enable_garbage_collection() -> None:
    """From here on, and never in what was imported: it stays, and going through it again and again takes half a second."""
    gc.freeze()
    gc.enable()


def exit_process(code: int) -> NoReturn:
    """Exit as multiprocessing's children do: what waits for threads or has files to delete does so, and the interpreter is
    not taken apart. A thread that is in native code then, as those of gloo are that have just done the last exchange, wants
    it back, and the process was aborted: a node of a run that had ended well seemed to have crashed, and the others waited.

    Nothing keeps a program alive that has done its work, and with it its lock: whoever follows it would wait for ever. Its
    result, or `exit.json`, counts more than the code that it is ended with; the log has what its threads were at.
    """
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read them is gone, or the disk is full
            stream.flush()
    os._exit(code)
