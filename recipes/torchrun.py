"""torch's launcher, made to say how its processes ended: `python -m recipes.torchrun OPTIONS -m recipes.train job.json`.

torchrun exits with 1 whatever its processes exit with. Here their code is told on, so that 78 (bad configuration) ends the
job at once and 143 (saved and left) is seen. A process that was killed makes the others fail for want of it: what they said
of themselves in `exit.json` is taken back, because the job was killed, and can go on. Whom torchrun itself ends because
another has failed was not killed: a configuration that is bad was tried twelve times.
"""

import gc
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from recipes.startup import prepare_imports

if __name__ == "__main__":
    prepare_imports()

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_FILE, EXIT_RESTART, Job

SAME_FAILURE_SECONDS = 1
"""Processes that end within this ended by themselves; one that does not heed torchrun's SIGTERM is killed much later."""


def first_exit_codes(failures: Collection[ProcessFailure]) -> list[int]:
    """The exit codes of those that ended first, negative where a signal ended one."""
    first = min(failure.timestamp for failure in failures)
    return [failure.exitcode for failure in failures if failure.timestamp <= first + SAME_FAILURE_SECONDS]


def find_kill_signals(codes: Sequence[int]) -> list[int]:
    """The signals that killed processes, and with them the job. SIGTERM is torchrun's own, to those that are left."""
    decisive = any(code in (EXIT_BAD_CONFIGURATION, EXIT_RESTART) for code in codes)
    return [] if decisive else [-code for code in codes if code < 0 and code != -signal.SIGTERM]


def choose_exit_code(codes: Sequence[int]) -> int:
    """Of a job whose processes ended with these."""
    if killed := find_kill_signals(codes):
        return 128 + killed[0]
    error_codes = [code for code in codes if code > 0]
    decisive = [code for code in error_codes if code in (EXIT_BAD_CONFIGURATION, EXIT_RESTART)]
    return next(iter((*decisive, *error_codes)), 128 + signal.SIGTERM)


def terminate_once(number: int, frame: FrameType | None, *, end: Callable[[int, FrameType | None], None]) -> None:
    """What torchrun does when it is asked to end, the first time. Its processes know, and save what they have.

    Asked again while it waited for them, it waited anew, and once for minutes for one that had ended long ago.
    """
    signal.signal(number, signal.SIG_IGN)
    end(number, frame)


def main() -> None:
    gc.enable()
    api._terminate_process_handler = partial(terminate_once, end=api._terminate_process_handler)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        codes = first_exit_codes(error.failures.values())
        if find_kill_signals(codes):
            job = Job.model_validate_json(Path(sys.argv[-1]).read_bytes())
            (Path(job.work_dir) / EXIT_FILE).unlink(missing_ok=True)
        sys.exit(choose_exit_code(codes))
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
