"""The work folder of a job on this machine, and the files with which the local backend keeps its state there.

Names are stored: folders and files of earlier releases are found again.
"""

from pathlib import Path

from recipes.contracts.job import Program
from resources.compute.job_key import JobKey

JOB_FILE = "job.json"
"""The document that the next attempt of the program reads."""
ATTEMPT_FILE = "attempt.json"
FAILED_ATTEMPTS_FILE = "faults.json"
"""How many attempts ended for another reason than preemption."""
QUEUED_START_FILE = "waits.json"
"""The start that is due as soon as the job is admitted."""
QUEUED_UNTIL_FILE = "waited"
"""Its modification time is when the job was last admitted after waiting."""
TIME_START_FILE = "began.json"
"""When the job's time limit started, in seconds since 1970, moved forward by as long as nothing ran."""
CLOCK_FILE = "clock.json"
"""The clock by which the time limit started, to notice when it is set."""
MEMORY_KILLS_FILE = "memory_kills.json"
"""The kernel's count of out-of-memory kills when the attempt started."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Local checkpoints of a training, one folder per step; a complete one has its final name and a manifest."""


def work_folder(jobs: Path, job: JobKey) -> Path:
    """Folder of a job's program below `jobs`.

    Programs that belong to a submitted job share its folder: `evaluate-ID` and `convert-ID` work in ID's. Those that are
    derived from a dataset version, with an id that starts with the program's name, have a folder of their own.
    """
    prefix = f"{job.program}-".replace("_", "-")
    if job.program in (Program.EVALUATE, Program.CONVERT):
        return jobs / job.id.removeprefix(prefix) / job.program
    is_derived = job.program in (Program.SPLIT, Program.VALIDATE, Program.FIND_LEAKS) or (
        job.program is Program.PREPARE and job.id.startswith(prefix)
    )
    return jobs / job.id if is_derived else jobs / job.id / job.program


def read_number(path: Path) -> int:
    return int(path.read_text()) if path.is_file() else 0
