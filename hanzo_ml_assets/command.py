"""The asset of command jobs: run a user's own command."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.failure_reason import make_failure, reports_exit_reason
from hanzo_ml_assets.run_metrics import machine_tags, record_usage
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.results import Usage
from recipes.storage.manifest import Artifact
from resources.compute.base import JobFailed
from resources.compute.local.capacity import GPU_POOL
from resources.errors import HanzoError
from resources.jobs.command import CODE, plan_command
from resources.jobs.sandbox import SANDBOX
from resources.lineage.edges import record_artifact
from resources.lineage.run_record import log_command_end, log_dataset_input, write_command_record
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.jobs import DATASET_KEY, ENDED_STATUSES, JobRecord
from resources.metadata.outbox import now_ms

COMMAND_KEY = ["jobs", "command"]
COMMAND_PARTITIONS = "command-runs"


def build_command() -> dg.AssetsDefinition:
    @dg.asset(
        key=COMMAND_KEY,
        partitions_def=dg.DynamicPartitionsDefinition(name=COMMAND_PARTITIONS),
        group_name=SANDBOX,
        kinds={"python"},
        description="Runs a user's own command as its job file specifies. One partition per submitted job.",
        pool=GPU_POOL,
        hooks=SUPERVISOR_HOOKS,
        code_version="1",
    )
    @reports_exit_reason
    def command(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        asked = control_plane.jobs.start(context.partition_key)
        try:
            version = find_dataset_version(asked, control_plane.datasets)
            job = build_command_job(asked, version, control_plane)
            run = write_command_record(control_plane.store, asked, job.inputs)
            if version is not None:
                log_dataset_input(control_plane.database, asked, version)
            result = run_program(context, job, control_plane, jobs=control_plane.jobs)
        except (BadConfiguration, JobFailed) as error:
            control_plane.jobs.fail(asked.id, str(error))
            raise make_failure(error, allow_retries=False) from None
        complete_command(asked, version, run, job, result, control_plane)
        return dg.MaterializeResult(
            metadata={
                "command": str(asked.config["command"]),
                "seconds": Usage.model_validate(result.facts).seconds,
                "run": dg.MetadataValue.url(f"{control_plane.settings.tracking_uri}/v1/runs/{asked.id}"),
                **{role: artifact.uri for role, artifact in result.artifacts.items()},
            }
        )

    return command


def find_dataset_version(asked: JobRecord, datasets: Datasets | None) -> DatasetVersion | None:
    """Return the dataset version that a job names, if it exists."""
    reference = asked.config.get(DATASET_KEY)
    try:
        return datasets.read(reference, asked.organization) if datasets and reference else None
    except HanzoError:
        return None


def build_command_job(asked: JobRecord, version: DatasetVersion | None, control_plane: ControlPlane) -> Job:
    """Return the job document. The program reports a missing dataset, like any missing input."""
    return plan_command(
        asked,
        version.artifact if version else None,
        store=control_plane.settings.store,
        tracking_uri=control_plane.settings.tracking_uri,
        cache_dir=control_plane.cache_dir,
    )


def complete_command(
    asked: JobRecord,
    version: DatasetVersion | None,
    run: Artifact,
    job: Job,
    result: Result,
    control_plane: ControlPlane,
) -> None:
    """Record job, run, lineage and events in one transaction."""
    made = {**result.artifacts, "run": run, **({CODE: job.inputs[CODE]} if CODE in job.inputs else {})}
    usage = Usage.model_validate(result.facts)
    with control_plane.database.write() as connection:
        for artifact in made.values():
            record_artifact(connection, artifact, control_plane.store.manifest(artifact))
        current = control_plane.jobs.get_locked(asked.id, connection)
        if current.status not in ENDED_STATUSES and usage.gpus:  # only once: a repeat would add points at another time
            record_usage(connection, asked.id, usage, job.hardware.gpu_type, now_ms(), control_plane)
        log_command_end(connection, control_plane.database, asked, version, machine_tags(result.machine))
        control_plane.jobs.complete(connection, asked.id, made, usage.seconds, usage.gpu_hours)
