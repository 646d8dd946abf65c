"""torch's launcher, made to say how its processes ended: `python -m recipes.torchrun OPTIONS -m recipes.train job.json`.

torchrun exits with 1 whatever its processes exit with. Here their code is told on, so that 78 (bad configuration) ends the
job at once and 143 (saved and left) is seen. A process that was killed makes the others fail for want of it: what they said
of themselves in `exit.json` is taken back, because the job was killed, and can go on.
"""

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from recipes.schema import EXIT_FILE, Job


def exit_code(codes: list[int]) -> int:
    """Of a job whose processes ended first with these, negative where a signal killed one."""
    killed = [code for code in codes if code < 0]
    return 128 - killed[0] if killed else codes[0]


def main() -> None:
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        if min(codes) < 0:
            job = Job.model_validate_json(Path(sys.argv[-1]).read_bytes())
            (Path(job.work_dir) / EXIT_FILE).unlink(missing_ok=True)
        sys.exit(exit_code(codes))
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
