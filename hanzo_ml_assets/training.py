"""The asset `checkpoint`: train a run, or resume it."""

import base64
import math
from collections.abc import Mapping
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.failure_reason import make_failure, reports_exit_reason
from hanzo_ml_assets.run_metrics import log_lost_losses, log_unsent_metrics, machine_tags, record_usage
from hanzo_ml_assets.run_tags import asset_group_name
from hanzo_ml_assets.supervisor import SUPERVISOR_HOOKS, run_program
from hanzo_ml_assets.training_plan import TrainingPlan, make_training_plan, training_job
from recipes.contracts.job import BadConfiguration, Job, Result
from recipes.contracts.recovery_log import read_recovery_log
from recipes.contracts.results import TrainingFacts, Usage, result_folder
from recipes.storage import uris
from resources.compute.base import JobFailed
from resources.compute.local.capacity import GPU_POOL
from resources.installation import NO_COMMIT
from resources.jobs.resume import settle_rewind
from resources.lineage.edges import record_artifact
from resources.lineage.run_record import Environment, format_param
from resources.metadata.field_rules import COMMIT_TAG
from resources.metadata.jobs import DATASET_KEY, ENDED_STATUSES, JobRecord
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking.run_data import RunData
from resources.monitoring.run_health import record_incidents

# The loss curve of a run as a small picture in Markdown, for the Dagster UI.

WIDTH, HEIGHT, MARGIN = 340, 170, 36
"""Width of an asset's overview cell in a 1400 pixel window; Dagster crops wider images."""


def loss_plot(losses: Mapping[int, float]) -> str:
    """Return step -> loss as a Markdown image; losses that are not finite are omitted."""
    points = sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))
    if len(points) < 2:
        return "no curve: fewer than two finite losses"
    last, top = points[-1][0], max(loss for _, loss in points)
    first = points[0][0]

    def place(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(last - first, 1)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * loss / (top or 1.0)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, loss) for step, loss in points)
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f'<path d="M{MARGIN},{MARGIN} V{HEIGHT - MARGIN} H{WIDTH - MARGIN}" stroke="#888" fill="none"/>'
        f'<polyline points="{line}" stroke="#4f43dd" stroke-width="2" fill="none"/>'
        f'<text x="4" y="{MARGIN + 4}">{top:.2f}</text><text x="14" y="{HEIGHT - MARGIN + 4}">0</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 12}">step {first}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 12}" text-anchor="end">step {last}, loss {points[-1][1]:.3f}</text></svg>'
    )
    return f"![loss by step](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})"


# What the tracker records when a training run starts: its parameters and its code.


def log_params(plan: TrainingPlan, control_plane: ControlPlane) -> None:
    """Log the run's standard parameters, those set by its job, and its code."""
    recipe, commit = plan.record.recipe, plan.record.environment.git_commit
    given = plan.job.config.get("parameters") or {}
    values = {
        **{key: value for key in given if is_plain(value := getattr(recipe, key))},
        "model": recipe.base_model.uri,
        "method": recipe.method,
        "objective": recipe.objective,
        "recipe": recipe.name,
        "learning_rate": recipe.learning_rate,
        "batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "max_steps": recipe.max_steps,
        "lora_rank": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "seed": recipe.seed,
        "dataset": plan.version.name,
        "dataset_version": plan.version.version,
        "git_commit": commit,
    }
    RunData(control_plane.database).log_batch(
        plan.record.run_id,
        params=[(key, format_param(value)) for key, value in values.items()],
        tags=[*([] if commit == NO_COMMIT else [(COMMIT_TAG, commit)]), *code_tags(plan.record.environment)],
    )


def is_plain(value: object) -> bool:
    """Whether the value is a scalar or a list of scalars."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | int | float | str | None) for each in values)


def code_tags(environment: Environment) -> list[tuple[str, str]]:
    """Return the code version for the run page.

    It is logged at the start, because failing runs need it most. The run's record has the full environment.
    """
    code = {"lock_sha256": environment.lock_sha256, "git_dirty": str(environment.git_dirty).lower()}
    return [(f"environment/{key}", value) for key, value in code.items()]


# The checkpoint asset: a partition is a tracking run; materializing it again resumes that run.

DAGSTER_USER = "dagster"
"""Owner of jobs launched in the Dagster UI, which has no users."""
DATASET_METADATA, RECIPE_METADATA = "hanzo_ml/dataset", "hanzo_ml/recipe"


class TrainingConfig(dg.Config):  # type: ignore[misc]
    """Launchpad settings of a new run; an earlier run resumes with its own settings."""

    name: str = Field("", description="the model's name in the registry, for a sandbox run")
    dataset: str = Field("", description="NAME or NAME@VERSION; the definition's dataset when empty")
    recipe: str = Field("", description="name of a recipe; the definition's recipe when empty")
    parameters: dict[str, Any] = Field({}, description="recipe keys with other values for this run")

    @property
    def overrides(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump().items() if value}


def build_checkpoint(model: ModelDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetsDefinition:
    @dg.asset(
        key=model.key("checkpoint"),
        deps=[["datasets", model.dataset, "train"], ["datasets", model.dataset, "validation"]],
        partitions_def=partitions,
        group_name=asset_group_name("models", model.name),
        kinds={"pytorch", "huggingface"},
        owners=list(model.owners),
        description=f"Fine-tunes with recipe {model.recipe}. A partition is a tracking run; materialize it again to resume.",
        metadata={DATASET_METADATA: model.dataset, RECIPE_METADATA: model.recipe},
        pool=GPU_POOL,
        hooks=SUPERVISOR_HOOKS,
        code_version="1",
    )
    @reports_exit_reason
    def checkpoint(
        context: dg.AssetExecutionContext, config: TrainingConfig, control_plane: ControlPlane
    ) -> dg.MaterializeResult:
        run_id = context.partition_key
        ensure_job(run_id, model.name, config.overrides, control_plane)
        settle_rewind(control_plane.database, control_plane.jobs.start(run_id))
        try:
            plan = make_training_plan(model, run_id, control_plane)
            control_plane.jobs.set_config_value(run_id, DATASET_KEY, plan.version.reference)
            job = training_job(plan, control_plane)
            log_params(plan, control_plane)
            result = run_program(context, job, control_plane, jobs=control_plane.jobs)
        except BadConfiguration as error:
            record_recoveries(run_id, control_plane)
            control_plane.jobs.fail(run_id, str(error))
            raise make_failure(error, allow_retries=False) from None
        except JobFailed:
            record_recoveries(run_id, control_plane)
            raise
        complete_training(plan, job, result, control_plane)
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
                "incidents": [incident.message for incident in facts.incidents],
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


def ensure_job(run_id: str, model: str, overrides: Mapping[str, Any], control_plane: ControlPlane) -> None:
    """Ensure that a run launched in the Dagster UI has its job.

    Raises:
        dagster.Failure: the run belongs to another model, or was started with settings other than the launchpad's.
    """
    job = record_launch(run_id, model, overrides, control_plane, "running")
    if job.config.get("model") != model:
        raise dg.Failure(
            f"run {run_id} belongs to another job, '{job.name}': add a partition of another name", allow_retries=False
        )
    known = {**job.config, DATASET_KEY: comparable_dataset(job, overrides)}
    if any(known.get(key) != value for key, value in overrides.items()):
        raise dg.Failure(
            f"run {run_id} was started with other settings: clear the launchpad to resume it, or add a new partition",
            allow_retries=False,
        )


def record_launch(
    run_id: str, model: str, overrides: Mapping[str, Any], control_plane: ControlPlane, status: Literal["queued", "running"]
) -> JobRecord:
    """Record the job of a run launched in the Dagster UI, unless it exists."""
    config = {"name": model, "model": model, **overrides}
    user, organization = DAGSTER_USER, DEFAULT_ORGANIZATION
    return control_plane.jobs.submit(
        name=config["name"], config=config, user=user, organization=organization, id=run_id, status=status
    )


def comparable_dataset(job: JobRecord, overrides: Mapping[str, Any]) -> str | None:
    """Return the job's dataset, without its pinned version if the launchpad names none."""
    reference = job.config.get(DATASET_KEY)
    name = str(reference).partition("@")[0]
    return name if name == overrides.get(DATASET_KEY) else reference


def complete_training(plan: TrainingPlan, job: Job, result: Result, control_plane: ControlPlane) -> None:
    """Record job, run, usage, lineage and events in one transaction, after any missing metrics."""
    made = {**result.artifacts, "run": plan.run, **plan.splits}  # the result cannot override either
    facts = TrainingFacts.model_validate(result.facts)
    if facts.unsent_metrics:
        log_unsent_metrics(job.id, result_folder(job), control_plane)
    log_lost_losses(job.id, facts.losses, control_plane)
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
            record_artifact(connection, artifact, control_plane.store.manifest(artifact))
        if (
            control_plane.jobs.get_locked(job.id, connection).status not in ENDED_STATUSES
        ):  # only once: a repeat would add points at another time
            record_usage(connection, job.id, usage, job.hardware.gpu_type, now_ms(), control_plane)
        record_incidents(connection, job.id, facts.incidents)
        RunData(control_plane.database).log_batch(job.id, tags=machine_tags(result.machine), connection=connection)
        control_plane.jobs.complete(connection, job.id, made, usage.seconds, usage.gpu_hours)


def record_recoveries(run_id: str, control_plane: ControlPlane) -> None:
    """Record the recoveries that a failed run's program attempted."""
    incidents = read_recovery_log(control_plane.store, uris.run_checkpoints(run_id))
    with control_plane.database.write() as connection:
        record_incidents(connection, run_id, incidents.entries)
