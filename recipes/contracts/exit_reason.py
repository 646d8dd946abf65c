"""Why an attempt ended: one enum, and the decisions that follow from each reason.

The program writes the reason as it ends, the supervisor where the program was killed. Restarts, retries of Dagster runs,
recovery and user messages are decided from it alone; the message next to it is for people.
"""

from enum import StrEnum

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, EXIT_PREEMPTED, EXIT_RESTART


class ExitReason(StrEnum):
    """Why an attempt of a job, or the process that supervised it, ended. The values are stored."""

    COMPLETED = "completed"
    BAD_CONFIGURATION = "bad_configuration"  # the user's input is wrong; the message says what to do
    PROGRAM_ERROR = "program_error"  # an error of the program, or of the user's script
    OUT_OF_MEMORY = "out_of_memory"  # an allocation failed, and the program has no smaller way to compute
    OOM_KILLED = "oom_killed"  # the kernel killed it for lack of memory
    KILLED = "killed"  # by a signal that it could not handle
    PREEMPTED = "preempted"  # asked to stop, and saved what it had
    RESTART_REQUESTED = "restart_requested"  # by the program, which has recorded what it will do differently
    NODE_LOST = "node_lost"  # the machine went away
    STORAGE_UNAVAILABLE = "storage_unavailable"  # the object store does not answer
    STORAGE_DENIED = "storage_denied"  # it refuses the keys, or has no such bucket
    STORAGE_FULL = "storage_full"  # no space left in the store or on the local disk
    STORAGE_READ_ONLY = "storage_read_only"  # the local disk was remounted read-only after errors
    TIMED_OUT = "timed_out"  # it used up schedule.max_duration
    CANCELLED = "cancelled"
    DATABASE_UNAVAILABLE = "database_unavailable"  # the supervisor could not reach the metadata or Dagster's database
    SUPERVISOR_FAILED = "supervisor_failed"  # the supervisor ran out of memory or time; the program may go on
    UNKNOWN = "unknown"  # it ended by itself, and could not write down why

    @property
    def restarts(self) -> bool:
        """Whether the supervisor starts the next attempt itself."""
        return self in RESTARTED

    @property
    def counts(self) -> bool:
        """Whether such an attempt counts against the job's limit of restarts."""
        return self not in UNCOUNTED

    @property
    def is_infrastructure(self) -> bool:
        """Whether neither the user nor the program is to blame: the same work may succeed later or elsewhere."""
        return self in INFRASTRUCTURE

    @property
    def is_outside_program(self) -> bool:
        """Whether storage, a database or the supervisor failed: the program's own work goes on where it was."""
        return self in OUTSIDE_PROGRAM

    @property
    def is_store_outage(self) -> bool:
        """Whether it is over as soon as the store answers, or has space, again. Wrong keys need somebody to act."""
        return self in STORE_OUTAGES

    @property
    def exit_code(self) -> int:
        """What a program exits with: all that a container runtime sees of the reason."""
        return EXIT_CODES.get(self, EXIT_RESTART if self.restarts else EXIT_ERROR)


EXIT_ERROR = 1
EXIT_CODES = {
    ExitReason.COMPLETED: 0,
    ExitReason.BAD_CONFIGURATION: EXIT_BAD_CONFIGURATION,
    ExitReason.PREEMPTED: EXIT_PREEMPTED,
}
"""Of the reasons that have a code of their own."""

RESTARTED = frozenset(
    {
        ExitReason.OOM_KILLED,
        ExitReason.KILLED,
        ExitReason.PREEMPTED,
        ExitReason.RESTART_REQUESTED,
        ExitReason.NODE_LOST,
        ExitReason.STORAGE_UNAVAILABLE,
        ExitReason.STORAGE_DENIED,
        ExitReason.UNKNOWN,
    }
)
UNCOUNTED = frozenset({ExitReason.PREEMPTED, ExitReason.NODE_LOST})
STORE_OUTAGES = frozenset({ExitReason.STORAGE_UNAVAILABLE, ExitReason.STORAGE_FULL})
OUTSIDE_PROGRAM = STORE_OUTAGES | {
    ExitReason.STORAGE_DENIED,
    ExitReason.DATABASE_UNAVAILABLE,
    ExitReason.SUPERVISOR_FAILED,
}
INFRASTRUCTURE = OUTSIDE_PROGRAM | {
    ExitReason.OUT_OF_MEMORY,
    ExitReason.OOM_KILLED,
    ExitReason.KILLED,
    ExitReason.PREEMPTED,
    ExitReason.RESTART_REQUESTED,
    ExitReason.NODE_LOST,
}
