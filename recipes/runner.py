"""How every program starts and ends: job file in, result into the object store, exit codes the supervisor understands.

Exit codes: 0 with a result; 78 bad configuration (never retried); 143 preempted after a checkpoint; 75 to be started again
otherwise; anything else is a fault. Whoever exits by itself says why in `exit.json`; who is killed cannot, and is recognized
by that.
"""

import atexit
import errno
import faulthandler
import gc
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from recipes.buckets import NO_SPACE, StoreFull, StoreRefuses, StoreUnavailable
from recipes.machine import read_machine
from recipes.schema import EXIT_BAD_CONFIGURATION, EXIT_FILE, EXIT_PREEMPTED, EXIT_RESTART, BadConfiguration, Job, Result
from recipes.store import BrokenArtifact, Store
from recipes.store_folder import away

Work = Callable[[Job, Store, Path], Result | None]
"""A program; of the processes of a distributed one, only the leader has the result."""

AGAIN = "starting again"
FOR_STORE = f"{AGAIN}: the object store"
"""How a program says why it ends that could not get at the store; `resources.compute.base` tells it by that."""
REFUSED = f"{FOR_STORE} refuses"
EXIT_SECONDS = 120
"""How long the interpreter may take to end: threads of libraries have kept programs alive that had done their work."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL = "no space left for {}: free some space"
READ_ONLY = "the file system of {} is read-only, as the kernel makes one whose disk has errors: mount it for writing"

COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Preempted(Exception):
    """The program was asked to stop, has saved what it had, and can go on from there."""


class Restart(Exception):
    """The program is to be started again: it has written down what it will do otherwise, or what it ran was killed."""


class Failed(Exception):
    """What the program was to run has failed by itself; another try would not help, and nothing here is at fault."""


def say(message: str) -> None:
    """One line of the job's log, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def one_line(message: str) -> str:
    """A message without colours, and without what no database holds or a terminal acts on."""
    return UNSEEN.sub("\ufffd", " ".join(COLOUR.sub("", message).split()))


def disk_trouble(error: Exception) -> str | None:
    """What kept a program from writing, and what to do about it; `{}` is for where. None where it failed otherwise."""
    if has_number(error, *FULL_DISK) or re.search("inline_container.* unexpected pos|iostream error", str(error)):
        return FULL  # the words are torch.save's
    return READ_ONLY if has_number(error, errno.EROFS) else None


def has_number(error: Exception, *numbers: int) -> bool:
    """Whether it is an error of the kernel with one of those numbers. Not all raise OSError: libraries in Rust (safetensors,
    obstore) tell the number, as `shutil.copytree` does of all that it could not copy, and torch.save what it means.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in numbers
    told = "|".join(rf"\(os error {number}\)|\[Errno {number}\]|strerror: {os.strerror(number)}" for number in numbers)
    return re.search(told, str(error)) is not None


def main(program: Work) -> None:
    """Run `program` on the job file named on the command line, then exit."""
    look_for_cycles()
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    work = Path(job.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    store = Store(job.store)

    def fail(message: str, code: int) -> NoReturn:
        """Exit; the last line says why, to people in the log and to the supervisor in `exit.json`.

        What a program reads where it lies in the store is in its own words not to be found, while the store is away.
        """
        if code not in (EXIT_PREEMPTED, EXIT_RESTART) and away(job.store):
            message, code = f"{FOR_STORE} is away: {message}", EXIT_RESTART
        line = one_line(message)
        print(f"error: {line}", file=sys.stderr, flush=True)
        tell_supervisor(work / EXIT_FILE, {"code": code, "message": line})
        end(code)

    try:
        result = program(job, store, work)
        if result:
            result = result.model_copy(update={"machine": read_machine()})
            store.put_bytes(job.result_uri, result.model_dump_json(indent=1).encode())
    except (BadConfiguration, BrokenArtifact) as error:
        fail(str(error), EXIT_BAD_CONFIGURATION)
    except Preempted as error:
        fail(f"preempted: {error}", EXIT_PREEMPTED)
    except Restart as error:
        fail(f"{AGAIN}: {error}", EXIT_RESTART)
    except Failed as error:
        fail(str(error), 1)
    except StoreRefuses as error:
        fail(f"{REFUSED}: {error}", EXIT_RESTART)
    except StoreUnavailable as error:
        traceback.print_exc()
        fail(f"{FOR_STORE} gives no answer, or refuses: {error}", EXIT_RESTART)
    except StoreFull as error:
        trouble, place = FULL, str(error).removesuffix(NO_SPACE)
    except SystemExit as error:
        # Of a library, or an objective of somebody else: taken for killed, it was begun twelve times.
        traceback.print_exc()
        fail(f"something called sys.exit: {error}", 1)
    except Exception as error:
        found = disk_trouble(error)
        if found is None:
            traceback.print_exc()
            fail(f"{type(error).__name__}: {error}", 1)
        trouble, place = found, str(getattr(error, "filename", None) or work)
    else:
        end(0)
    # Not before the error is gone: its frames hold the half-written file open, and with it the room for `exit.json`.
    fail(f"{trouble.format(place)}, then retry; nothing saved so far is lost", 1)


def tell_supervisor(path: Path, why: object) -> None:
    """Write down why, whole; of several processes the first knows, since the others fail for want of it.

    The disk may be the reason, and a full one takes a name without anything in it: that is left, so that a program which
    ended by itself is not taken for killed.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with scratch.open("w") as file:
            json.dump(why, file)
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


def look_for_cycles() -> None:
    """From here on, and never in what was imported: it stays, and going through it again and again takes half a second."""
    gc.freeze()
    gc.enable()


def end(code: int) -> NoReturn:
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
