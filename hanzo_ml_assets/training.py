"""The checkpoint asset: one partition is one tracking run; materializing it again resumes that run."""

from collections.abc import Mapping
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from hanzo_ml_assets.control_plane import ControlPlane, follow
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import reports_exit_reason
from hanzo_ml_assets.loss_plot import loss_plot
from hanzo_ml_assets.machine_tags import machine_tags
from hanzo_ml_assets.run_metrics import log_lost
from hanzo_ml_assets.run_params import log_params
from hanzo_ml_assets.run_tags import group_name
from hanzo_ml_assets.training_job import training_job
from hanzo_ml_assets.training_plan import Plan, make_plan
from hanzo_ml_assets.unsent import log_unsent
from hanzo_ml_assets.used import tell_used
from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.recovery_log import read_incidents
from recipes.contracts.results import TrainingFacts
from recipes.storage import uris
from recipes.usage import Usage, folder_of
from resources.compute.base import JobFailed
from resources.compute.local.capacity import GPU_POOL
from resources.jobs.resume import settle
from resources.lineage.record import record
from resources.metadata.jobs import DATASET, ENDED, JobRecord
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.run_health import tell_incidents

DAGSTER = "dagster"
"""Whose job it is that was asked for in the Dagster UI, which knows no users."""
DATASET_METADATA, RECIPE_METADATA = "hanzo_ml/dataset", "hanzo_ml/recipe"


class TrainingConfig(dg.Config):  # type: ignore[misc]
    """What the launchpad of the Dagster UI asks for a new run; a run that was started before goes on as it was."""

    name: str = Field("", description="the model's name in the registry, for a run in the sandbox")
    dataset: str = Field("", description="NAME or NAME@VERSION; the definition's own where empty")
    recipe: str = Field("", description="name of a recipe; the definition's own where empty")
    parameters: dict[str, Any] = Field({}, description="keys of the recipe with other values for this run")

    @property
    def given(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump().items() if value}


def build_checkpoint(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("checkpoint"),
        deps=[["datasets", model.dataset, "train"], ["datasets", model.dataset, "validation"]],
        partitions_def=partitions,
        group_name=group_name("models", model.name),
        kinds={"pytorch", "huggingface"},
        owners=list(model.owners),
        description=f"Fine-tuning with the recipe {model.recipe}. A partition is a tracking run; once more resumes it.",
        metadata={DATASET_METADATA: model.dataset, RECIPE_METADATA: model.recipe},
        pool=GPU_POOL,
        code_version="1",
    )
    @reports_exit_reason
    def checkpoint(
        context: dg.AssetExecutionContext, config: TrainingConfig, control_plane: ControlPlane
    ) -> dg.MaterializeResult:
        run_id = context.partition_key
        ensure_job(run_id, model.name, config.given, control_plane)
        settle(control_plane.database, control_plane.jobs.start(run_id))
        try:
            plan = make_plan(model, run_id, control_plane)
            control_plane.jobs.specify(run_id, DATASET, plan.version.reference)
            job = training_job(plan, control_plane)
            log_params(plan, control_plane)
            result = control_plane.compute.run(job, follow(context, job, control_plane.jobs))
        except BadConfiguration as error:
            tell_healed(run_id, control_plane)
            control_plane.jobs.fail(run_id, str(error))
            raise dg.Failure(str(error), allow_retries=False) from None
        except JobFailed:
            tell_healed(run_id, control_plane)
            raise
        complete(plan, job, result, control_plane)
        trained = result.artifacts[plan.record.recipe.trained_role]
        facts = TrainingFacts.model_validate(result.facts)
        losses = {step: loss for step, loss in facts.losses.items() if loss is not None}
        return dg.MaterializeResult(
            metadata={
                "loss": dg.MetadataValue.md(loss_plot(losses)),
                "final_loss": losses.get(max(facts.losses), float("nan")),
                "steps": int(result.metrics["total_steps"]),
                "train_seconds": facts.train_seconds,
                "checkpoint_share": facts.checkpoint_share,
                "peak_memory_gb": facts.peak_memory / 1e9,
                "published_step": facts.published_step,
                "incidents": [incident.words for incident in facts.incidents],
                "dataset_version": plan.version.reference,
                "recipe": plan.record.recipe.name,
                "git_commit": plan.record.environment.git_commit,
                "run": dg.MetadataValue.url(f"{control_plane.settings.tracking_uri}/v1/runs/{run_id}"),
                "uri": trained.uri,
                "digest": trained.digest,
            },
            data_version=dg.DataVersion(trained.digest),
        )

    return checkpoint


def ensure_job(run_id: str, model: str, given: Mapping[str, Any], control_plane: ControlPlane) -> None:
    """The job of a run, recorded now where a click in the Dagster UI is the first to ask for it.

    Raises:
        dagster.Failure: the run is of another model, or was started with other settings than the launchpad gives now.
    """
    job = record_click(run_id, model, given, control_plane, "running")
    if job.config.get("model") != model:
        raise dg.Failure(
            f"run {run_id} is of another job, '{job.name}': add a partition of another name", allow_retries=False
        )
    known = {**job.config, DATASET: as_given(job, given)}
    if any(known.get(key) != value for key, value in given.items()):
        raise dg.Failure(
            f"run {run_id} was started with other settings: empty the launchpad to go on with it, or add a new partition",
            allow_retries=False,
        )


def record_click(
    run_id: str, model: str, given: Mapping[str, Any], control_plane: ControlPlane, status: Literal["queued", "running"]
) -> JobRecord:
    """The job that a run does which was launched in the Dagster UI; one that is recorded already stays as it is."""
    config = {"name": model, "model": model, **given}
    user, organization = DAGSTER, DEFAULT_ORGANIZATION
    return control_plane.jobs.submit(
        name=config["name"], config=config, user=user, organization=organization, id=run_id, status=status
    )


def as_given(job: JobRecord, given: Mapping[str, Any]) -> str | None:
    """The dataset of a job; its name alone, where the launchpad gives that: which version it was is pinned by now."""
    reference = job.config.get(DATASET)
    name = str(reference).partition("@")[0]
    return name if name == given.get(DATASET) else reference


def complete(plan: Plan, job: Job, result: Result, control_plane: ControlPlane) -> None:
    """Job, run, what it used, lineage and events in one transaction; before it, what the tracker never got, or has lost."""
    made = {"run": plan.run, **plan.splits, **result.artifacts}
    facts = TrainingFacts.model_validate(result.facts)
    if facts.unsent_metrics:
        log_unsent(job.id, folder_of(job), control_plane)
    log_lost(job.id, facts.losses, control_plane)
    usage = Usage(
        seconds=facts.train_seconds,
        gpus=job.gpus if facts.gpus is None else facts.gpus,
        gpu_seconds=facts.gpu_seconds,
        checkpoints=facts.checkpoint_seconds,
        peak_memory=facts.peak_memory,
        steps=int(result.metrics["total_steps"]),
        tokens=facts.tokens,
    )
    with control_plane.database.write() as connection:
        for artifact in made.values():
            record(connection, artifact, control_plane.store.manifest(artifact))
        if control_plane.jobs.held(job.id, connection).status not in ENDED:  # told once: the time of a point is part of it
            tell_used(connection, job.id, usage, job.hardware.gpu_type, now_ms(), control_plane)
        tell_incidents(connection, job.id, facts.incidents)
        RunData(control_plane.database).log_batch(job.id, tags=machine_tags(result.machine), connection=connection)
        control_plane.jobs.complete(connection, job.id, made, usage.seconds, usage.gpu_hours)


def tell_healed(run_id: str, control_plane: ControlPlane) -> None:
    """What the program of a run that has failed had tried before."""
    incidents = read_incidents(control_plane.store, uris.run_checkpoints(run_id))
    with control_plane.database.write() as connection:
        tell_incidents(connection, run_id, incidents.entries)
