"""The asset of command jobs: one partition is one job, and its tracking run; materializing it again goes on with it."""

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane, follow
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.machine_tags import machine_tags
from hanzo_ml_assets.used import tell_used
from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.storage.manifest import Artifact
from recipes.usage import Usage
from resources.compute.base import JobFailed
from resources.compute.local.capacity import GPU_POOL
from resources.errors import HanzoError
from resources.jobs.command import CODE, command_work
from resources.jobs.sandbox import SANDBOX
from resources.lineage.command_record import tell_end, tell_input, write_command_record
from resources.lineage.record import record
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.jobs import DATASET, ENDED, JobRecord
from resources.metadata.outbox import now_ms

KEY = ["jobs", "command"]
PARTITIONS = "command-runs"


def build_command() -> dg.AssetsDefinition:
    @dg.asset(
        key=KEY,
        partitions_def=dg.DynamicPartitionsDefinition(name=PARTITIONS),
        group_name=SANDBOX,
        kinds={"python"},
        description="A command of a user's own, as its job file says. A partition is a job that was submitted.",
        pool=GPU_POOL,
        code_version="1",
    )
    @reports_exit_reason
    def command(context: dg.AssetExecutionContext, control_plane: ControlPlane) -> dg.MaterializeResult:
        asked = control_plane.jobs.start(context.partition_key)
        try:
            version = version_of(asked, control_plane.datasets)
            job = work_of(asked, version, control_plane)
            run = write_command_record(control_plane.store, asked, job.inputs)
            if version is not None:
                tell_input(control_plane.database, asked, version)
            result = control_plane.compute.run(job, follow(context, job, control_plane.jobs))
        except (BadConfiguration, JobFailed) as error:
            control_plane.jobs.fail(asked.id, str(error))
            raise dg.Failure(str(error), allow_retries=False) from None
        complete(asked, version, run, job, result, control_plane)
        return dg.MaterializeResult(
            metadata={
                "command": str(asked.config["command"]),
                "seconds": Usage.model_validate(result.facts).seconds,
                "run": dg.MetadataValue.url(f"{control_plane.settings.tracking_uri}/v1/runs/{asked.id}"),
                **{role: artifact.uri for role, artifact in result.artifacts.items()},
            }
        )

    return command


def version_of(asked: JobRecord, datasets: Datasets | None) -> DatasetVersion | None:
    """The version that a job names, where it is there."""
    reference = asked.config.get(DATASET)
    try:
        return datasets.read(reference, asked.organization) if datasets and reference else None
    except HanzoError:
        return None


def work_of(asked: JobRecord, version: DatasetVersion | None, control_plane: ControlPlane) -> Job:
    """What compute is handed. A dataset that is not there is told of by the program, as all that it cannot run with."""
    return command_work(
        asked,
        version.artifact if version else None,
        store=control_plane.settings.store,
        tracking_uri=control_plane.settings.tracking_uri,
        cache_dir=control_plane.cache_dir,
    )


def complete(
    asked: JobRecord,
    version: DatasetVersion | None,
    run: Artifact,
    job: Job,
    result: Result,
    control_plane: ControlPlane,
) -> None:
    """Job, run, lineage and events in one transaction."""
    made = {"run": run, **({CODE: job.inputs[CODE]} if CODE in job.inputs else {}), **result.artifacts}
    usage = Usage.model_validate(result.facts)
    with control_plane.database.write() as connection:
        for artifact in made.values():
            record(connection, artifact, control_plane.store.manifest(artifact))
        current = control_plane.jobs.held(asked.id, connection)
        if current.status not in ENDED and usage.gpus:  # told once: the time of a point is part of it
            tell_used(connection, asked.id, usage, job.hardware.gpu_type, now_ms(), control_plane)
        tell_end(connection, control_plane.database, asked, version, machine_tags(result.machine))
        control_plane.jobs.complete(connection, asked.id, made, usage.seconds, usage.gpu_hours)
