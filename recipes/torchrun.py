"""torchrun with meaningful exit codes: `python -m recipes.torchrun OPTIONS -m recipes.train job.json`.

torchrun itself exits with 1 for any exit code of its processes. Here the code is passed on, so that 78 (bad configuration)
fails the job at once and 143 (preempted) is recognized. If a process was killed, the others fail as a consequence: their
`exit.json` is removed, because the job was killed and can resume. Processes that torchrun terminates because another one
failed do not count as killed: otherwise a bad configuration was retried twelve times.
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
"""Processes that end within this time ended by themselves; one that ignores torchrun's SIGTERM is killed much later."""


def first_exit_codes(failures: Collection[ProcessFailure]) -> list[int]:
    """Return the exit codes of the processes that ended first, negative for signals."""
    first = min(failure.timestamp for failure in failures)
    return [failure.exitcode for failure in failures if failure.timestamp <= first + SAME_FAILURE_SECONDS]


def find_kill_signals(codes: Sequence[int]) -> list[int]:
    """Return the signals that killed processes, and thus the job.

    SIGTERM is torchrun's own, for remaining processes.
    """
    decisive = any(code in (EXIT_BAD_CONFIGURATION, EXIT_RESTART) for code in codes)
    return [] if decisive else [-code for code in codes if code < 0 and code != -signal.SIGTERM]


def choose_exit_code(codes: Sequence[int]) -> int:
    """Return the exit code of a job whose processes ended with these codes."""
    if killed := find_kill_signals(codes):
        return 128 + killed[0]
    error_codes = [code for code in codes if code > 0]
    decisive = [code for code in error_codes if code in (EXIT_BAD_CONFIGURATION, EXIT_RESTART)]
    return next(iter((*decisive, *error_codes)), 128 + signal.SIGTERM)


def terminate_once(number: int, frame: FrameType | None, *, end: Callable[[int, FrameType | None], None]) -> None:
    """Handle the first SIGTERM as torchrun does and ignore others.

    The processes save and stop. A repeated signal restarted torchrun's wait, once for minutes for a process that had ended
    long before.
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
