"""Run a job's program from an asset, in the Dagster run that supervises it.

The program outlives its supervisor. Run tags record which programs a run follows, so that the programs of a cancelled run
can be found without the run. The end of a program is acknowledged once Dagster has recorded the asset's outcome.
"""

import logging
from collections.abc import Iterable

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import Job, Result
from resources.compute.base import Follower, JobKey, Observation, Phase
from resources.metadata.jobs import Jobs

log = logging.getLogger(__name__)

CANCELLED = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
WAITING_PHASES = (Phase.PENDING, Phase.STARTING, Phase.SUSPENDED)
PHASE_PHRASES = {
    Phase.PENDING: "is queued",
    Phase.STARTING: "is starting",
    Phase.SUSPENDED: "had to make room, and resumes once it is admitted again",
    Phase.RUNNING: "is running",
    Phase.RESTARTING: "restarts",
    Phase.SUCCEEDED: "has succeeded",
    Phase.FAILED: "has failed",
}


def run_program(
    context: dg.AssetExecutionContext, job: Job, control_plane: ControlPlane, *, jobs: Jobs | None = None
) -> Result:
    """Run or attach to the program until its end, reporting its log and phases.

    With `jobs`, the job's record also states what the program waits for: a job without a GPU would otherwise appear to run.
    Raises:
        BadConfiguration: the program refused its input; the message says what to do.
        JobFailed: it ended otherwise without a result; its `reason` says why.
    """
    # The first run that follows a program may start after it: a queued job gets its run at admission.
    is_first = not list_program_runs(context.instance, job)
    context.instance.add_run_tags(context.run.run_id, program_tags(job))
    if jobs is not None:
        context.log.info(f"the whole log of job {job.id}: {control_plane.settings.tracking_uri}/v1/jobs/{job.id}/logs")
    return control_plane.compute.run(job, follow_job(context, job, jobs, whole_log=is_first))


def program_tags(job: JobKey) -> dict[str, str]:
    """Return the tags of a run that follows a program; it may follow several."""
    return {f"hanzo_ml/{job.program}": job.id}


def follow_job(context: dg.AssetExecutionContext, job: Job, jobs: Jobs | None, *, whole_log: bool) -> Follower:
    last_phrase = ""

    def phase(seen: Observation) -> None:
        nonlocal last_phrase
        phrase = describe_phase(seen)
        if phrase != last_phrase:
            context.log.info(f"{job.program} {phrase}")
            last_phrase = phrase
        if jobs is not None:
            jobs.set_waiting_reason(job.id, seen.detail if seen.phase in WAITING_PHASES else "", "running")

    def line(text: str) -> None:
        context.log.info(text)
        print(text, flush=True)  # Dagster stores it as the run's stdout, which can be downloaded

    return Follower(
        line=line,
        phase=phase,
        is_cancelled=lambda: is_program_cancelled(context.instance, context.run.run_id, job),
        whole_log=whole_log,
    )


def describe_phase(seen: Observation) -> str:
    """Describe a program's phase. One that restarts is still in the ended attempt."""
    phrase = PHASE_PHRASES[seen.phase]
    if seen.phase is Phase.RESTARTING:
        phrase = f"{phrase} after attempt {seen.attempt}"
    elif seen.attempt > 1:
        phrase = f"{phrase} (attempt {seen.attempt})"
    return f"{phrase}: {seen.detail}" if seen.detail else phrase


def is_program_cancelled(instance: dg.DagsterInstance, run_id: str, job: JobKey) -> bool:
    """Whether an interrupted run worker must end its program; eviction interrupts it likewise.

    The program continues if another run follows it. Return False if Dagster's database does not answer: the sensor
    `stop_cancelled_jobs` ends unsupervised programs.
    """
    try:
        run = instance.get_run_by_id(run_id)
        if run is None or run.status not in CANCELLED:
            return False
        return not any(each.run_id != run_id for each in list_unfinished(list_program_runs(instance, job)))
    except Exception as error:
        log.warning("cannot read the status of run %s, its program continues: %r", run_id, error)
        return False


def list_program_runs(instance: dg.DagsterInstance, job: JobKey) -> list[dg.DagsterRun]:
    """Return the runs that follow or followed a program, newest first."""
    return list(instance.get_runs(dg.RunsFilter(tags=program_tags(job))))


def list_unfinished(runs: Iterable[dg.DagsterRun]) -> list[dg.DagsterRun]:
    """Return the runs that still work or will."""
    return [run for run in runs if not run.is_finished and run.status not in CANCELLED]


def is_abandoned(instance: dg.DagsterInstance, job: JobKey) -> bool:
    """Whether a program's last run was cancelled and no other run follows it.

    The run's worker then died before it could end the program. After a failed run the program continues: another run will
    attach to it.
    """
    runs = list_program_runs(instance, job)
    return bool(runs) and runs[0].status is dg.DagsterRunStatus.CANCELED and not list_unfinished(runs)


def acknowledge_ends(context: dg.HookContext) -> None:
    context.resources.control_plane.compute.acknowledge_ends()


SUPERVISOR_HOOKS = frozenset(
    decorate(name=name, required_resource_keys={"control_plane"})(acknowledge_ends)
    for decorate, name in ((dg.success_hook, "acknowledge_success"), (dg.failure_hook, "acknowledge_failure"))
)
"""Hooks of each asset that runs programs.

Dagster calls them once it has stored how the step ended. A supervisor that is killed earlier is replaced by one that
receives the same end again.
"""
