"""Start submitted jobs once their data is checked and split and their quota has room.

A check that blocks the dataset fails its trainings; a command of the user's own waits for no data. The run key is the job's
id, with a suffix per resume, so each start happens exactly once. If the backend has its own queue, the job is submitted to
it here, and its run starts at admission.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import dagster as dg
from dagster._core.launcher import WorkerStatus
from sqlalchemy import Connection

from hanzo_ml_assets.command import COMMAND_KEY, COMMAND_PARTITIONS
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.run_tags import version_tags
from hanzo_ml_assets.training import DAGSTER_USER
from resources.compute.base import Observation
from resources.compute.local.capacity import max_running_jobs
from resources.errors import HanzoError
from resources.metadata.dataset_problems import find_problems
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import COMMAND, DATASET_KEY, TRACKED_TYPES, JobRecord
from resources.monitoring.service_heartbeats import SENSORS_NAME
from resources.settings.scheduler import Scheduler
from sensors.decisions.definition_lookup import explain_undefined, find_model_dataset, takes_defined_name
from sensors.decisions.job_quota import apply_quotas
from sensors.decisions.job_runs import PARTITION_TAG, RUN_KEY_TAG, newest_run
from sensors.decisions.job_submission import Step, describe_full, next_step, submit_jobs
from sensors.decisions.retry_policy import is_given_up
from sensors.sensor import INTERVAL_SECONDS, sensor

MAX_NEW_RUNS = 20
"""Limit per tick: launching 50 runs took over a minute, and a tick may take 60 seconds."""


@dataclass(frozen=True)
class Decision:
    """Whether a queued job starts, waits or fails; the last two with a reason.

    A job whose run Dagster has queued keeps starting, with a reason to wait. `dataset` is the version to train on if the job
    named none. `submit` puts the job into the backend's queue, where it waits without a run.
    """

    start: bool = False
    wait: str = ""
    fail: str = ""
    dataset: str = ""
    submit: bool = False


@sensor(interval=INTERVAL_SECONDS, description="Starts each submitted job: training once its dataset is split.")
def start_submitted_jobs(context: dg.SensorEvaluationContext, control_plane: ControlPlane) -> dg.SensorResult:
    # Read state, not events: a job may have to wait, and a cursor waiting with it would block all later jobs.
    requests: list[dg.RunRequest] = []
    with control_plane.database.read() as connection:
        jobs = [job for job in control_plane.jobs.queued(connection) if job.type in TRACKED_TYPES]
        decided = [decide_start(context, job, control_plane, connection) for job in jobs]
        if control_plane.compute.queues_jobs:
            decisions = apply_backend_queue(context, jobs, decided, control_plane, connection)
        else:
            decisions = apply_quota_decisions(context, jobs, decided, control_plane, connection)
            decisions = mark_queued_runs(context.instance, jobs, decisions, control_plane.settings.scheduler)
    new = 0
    for job, decision in zip(jobs, decisions, strict=True):
        if decision.dataset and not job.config.get(DATASET_KEY):
            control_plane.jobs.set_config_value(job.id, DATASET_KEY, decision.dataset)
        if decision.fail:
            with suppress(HanzoError):  # ended concurrently; continue with the other jobs
                control_plane.jobs.fail(job.id, decision.fail)
        if decision.wait and decision.wait != job.reason:
            control_plane.jobs.set_waiting_reason(job.id, decision.wait)
        if decision.start and new < MAX_NEW_RUNS:
            partitions, _ = find_job_asset(job)
            # Repeated requests are safe: Dagster starts a run key once.
            new += job.resumed.times > 0 or not context.instance.has_dynamic_partition(partitions, job.id)
            requests.append(make_run_request(context.instance, job))
    submit_jobs(context, [job for job, decision in zip(jobs, decisions, strict=True) if decision.submit], control_plane)
    # One heartbeat for all sensors, because one daemon evaluates them: users waiting for a job see whether it runs.
    control_plane.heartbeats.beat(SENSORS_NAME)
    return dg.SensorResult(run_requests=requests)


def apply_quota_decisions(
    context: dg.SensorEvaluationContext,
    jobs: Sequence[JobRecord],
    decisions: Sequence[Decision],
    control_plane: ControlPlane,
    connection: Connection,
    submitted: Collection[str] | None = None,
) -> list[Decision]:
    """Return the decisions, with waits and failures where the organization's quota requires them."""
    scheduler = control_plane.settings.scheduler
    starting = [job for job, decision in zip(jobs, decisions, strict=True) if decision.start]
    if not scheduler.quotas or not starting:
        return list(decisions)
    waits, never = apply_quotas(context, starting, scheduler, control_plane.jobs.active(connection), submitted)
    return [
        replace(decision, start=False, wait=waits.get(job.id, ""), fail=never.get(job.id, ""))
        if job.id in waits or job.id in never
        else decision
        for job, decision in zip(jobs, decisions, strict=True)
    ]


def apply_backend_queue(
    context: dg.SensorEvaluationContext,
    jobs: Sequence[JobRecord],
    decisions: Sequence[Decision],
    control_plane: ControlPlane,
    connection: Connection,
) -> list[Decision]:
    """Return the decisions for a backend queue: jobs are submitted, and start after admission."""
    active = control_plane.jobs.active(connection)
    observed = dict(zip((job.id for job in active), control_plane.compute.observe_submitted(active), strict=True))
    submitted = {job_id for job_id, seen in observed.items() if seen is not None}
    decisions = apply_quota_decisions(context, jobs, decisions, control_plane, connection, submitted)
    full = describe_full(observed.values(), control_plane.settings.scheduler)
    return [
        queue_decision(decision, observed.get(job.id), full) if decision.start else decision
        for job, decision in zip(jobs, decisions, strict=True)
    ]


def queue_decision(decision: Decision, seen: Observation | None, full: str) -> Decision:
    """Return the decision for one job; `full` says why no further job is submitted."""
    match next_step(seen):
        case Step.RUN:
            return decision
        case Step.WAIT:
            assert seen is not None
            return replace(decision, start=False, wait=seen.detail or "waits in the queue of the cluster")
        case Step.SUBMIT:
            return replace(decision, start=False, submit=not full, wait=full)


def mark_queued_runs(
    instance: dg.DagsterInstance, jobs: Sequence[JobRecord], decisions: Sequence[Decision], scheduler: Scheduler
) -> list[Decision]:
    """Return the decisions, with a waiting reason for jobs whose run is queued in Dagster."""
    words = f"waits for its turn: this machine runs {max_running_jobs(scheduler)} at a time"
    if not any(decision.start and job.reason != words for job, decision in zip(jobs, decisions, strict=True)):
        return list(decisions)
    waiting = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))
    keys = {run.tags.get(RUN_KEY_TAG) for run in waiting}
    return [
        replace(decision, wait=words) if decision.start and run_key(job) in keys else decision
        for job, decision in zip(jobs, decisions, strict=True)
    ]


def make_run_request(instance: dg.DagsterInstance, job: JobRecord) -> dg.RunRequest:
    """Request a run of the job's asset, and register the job's partition in Dagster."""
    partitions, asset = find_job_asset(job)
    instance.add_dynamic_partitions(partitions, [job.id])
    return dg.RunRequest(run_key=run_key(job), partition_key=job.id, asset_selection=[asset])


def run_key(job: JobRecord) -> str:
    times = job.resumed.times
    return f"{job.id}-{times}" if times else job.id


def is_still_ending(instance: dg.DagsterInstance, job: JobRecord, control_plane: ControlPlane) -> bool:
    """Whether the previous attempt of a resumed job is still saving its checkpoint.

    A program whose worker has died is terminated here.
    """
    if not job.resumed.times:
        return False
    runs = instance.get_runs(dg.RunsFilter(tags={PARTITION_TAG: job.id}))
    if any(run.tags.get(RUN_KEY_TAG) == run_key(job) for run in runs):
        return False
    unfinished = [run for run in runs if not run.is_finished]
    if unfinished:
        report_dead_workers(instance, unfinished)
        return True
    if still_runs := control_plane.compute.has_processes(job) and not is_resubmitted(job, control_plane):
        control_plane.compute.terminate_processes(job)
    return still_runs


def is_resubmitted(job: JobRecord, control_plane: ControlPlane) -> bool:
    """Whether the backend's entry is of the resumed job, and only waits for its run."""
    if not control_plane.compute.queues_jobs:
        return False
    with control_plane.database.read() as connection:
        resumed_at = control_plane.jobs.resumed_at(job.id, connection)
    return control_plane.compute.queued_until(job) >= resumed_at


def report_dead_workers(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> None:
    """Report runs as cancelled whose worker died while cancelling; Dagster would wait long."""
    if instance.run_launcher.supports_check_run_worker_health:
        for run in runs:
            ending = run.status == dg.DagsterRunStatus.CANCELING
            if ending and instance.run_launcher.check_run_worker_health(run).status == WorkerStatus.FAILED:
                instance.report_run_canceled(run)


def find_job_asset(job: JobRecord) -> tuple[str, dg.AssetKey]:
    """Return the partitions and the asset of a job."""
    if job.type == COMMAND:
        return COMMAND_PARTITIONS, dg.AssetKey(COMMAND_KEY)
    model = str(job.config["model"])
    return f"{model}-runs", dg.AssetKey(["models", model, "checkpoint"])


def has_reserved_name(context: dg.SensorEvaluationContext, job: JobRecord) -> bool:
    """Whether a sandbox job's versions would belong to a defined model and bypass its gate.

    A replay makes no versions. Started jobs are exempt, or a definition added later would make them impossible to resume.
    """
    new = job.started_at is None and job.replay_of is None
    return new and takes_defined_name(context, str(job.config["model"]), job.name)


def decide_start(
    context: dg.SensorEvaluationContext, job: JobRecord, control_plane: ControlPlane, connection: Connection
) -> Decision:
    if is_still_ending(context.instance, job, control_plane):
        return Decision(wait="waits until what ran before it was resumed has ended")
    if job.type == COMMAND:
        return Decision(start=True)
    if job.user_id == DAGSTER_USER and not job.resumed.times:
        return decide_launched_job(context.instance, job)
    model = str(job.config["model"])
    if missing := explain_undefined(context, model):
        return Decision(fail=missing)
    if has_reserved_name(context, job):
        what = f"'{job.name}' has a definition, whose gate its versions pass"
        return Decision(fail=f"{what}: submit it with --model {job.name}, or give this job another name")
    reference = str(job.config.get(DATASET_KEY) or find_model_dataset(context, model))
    try:
        version = control_plane.datasets.resolve(reference, job.organization, connection)
    except HanzoError as error:
        return Decision(fail=error.message)
    if blocked := control_plane.validations.blocked(version.id, connection):
        return Decision(fail=f"{blocked}: see `hanzo-ml dataset check {version.reference}`")
    if not version.splits or not control_plane.validations.has_split_verdict(version.id, connection):
        if run := failed_split(context.instance, version):
            problem = find_problems(connection, [version.id]).get(version.id)
            reason = problem.problem if problem else f"could not be checked and split: see run {run} in Dagster"
            return Decision(fail=f"dataset {version.reference} {reason}")
        return Decision(wait=f"waits for the checks and splits of {version.reference}", dataset=version.reference)
    return Decision(start=True, dataset=version.reference)


def decide_launched_job(instance: dg.DagsterInstance, job: JobRecord) -> Decision:
    """Wait for the queued run of a job launched in Dagster; never start another."""
    if newest_run(instance, job.id, resumed_at=0) is None:
        return Decision(fail="its run was deleted in Dagster before it began: launch it again in a new partition")
    return Decision(wait="waits for its turn in Dagster's queue")


def failed_split(instance: dg.DagsterInstance, version: DatasetVersion) -> str | None:
    """Return the run that finally failed to split a version, or None."""
    newest = next(iter(instance.get_run_records(dg.RunsFilter(tags=version_tags(version)), limit=1)), None)
    if newest is None or newest.dagster_run.status != dg.DagsterRunStatus.FAILURE:
        return None
    return str(newest.dagster_run.run_id) if is_given_up(newest, datetime.now(UTC)) else None
