"""The checkpoint asset: one partition is one tracking run; materializing it again resumes that run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field, JsonValue

from hanzo_ml_assets.control_plane import SOURCE, ControlPlane, follow
from hanzo_ml_assets.definition import ModelDefinition
from hanzo_ml_assets.loss_plot import loss_plot
from hanzo_ml_assets.machine_tags import machine_tags
from hanzo_ml_assets.unsent import log_unsent
from hanzo_ml_assets.used import tell_used
from hanzo_ml_assets.version_tag import group_name
from recipes.architecture import Architecture
from recipes.incidents import read_incidents
from recipes.manifest import Artifact
from recipes.recipe import Recipe
from recipes.results import TrainingFacts
from recipes.schema import BadConfiguration, Job, Program, Result, Tracking
from recipes.store import BrokenArtifact, Store
from recipes.usage import Usage, folder_of
from resources.compute.base import JobFailed
from resources.compute.devices import POOL
from resources.errors import HanzoError
from resources.estimate.admission import admit, admit_dataset
from resources.estimate.shapes import shape_of_base
from resources.lineage.record import record
from resources.lineage.run_record import (
    NO_COMMIT,
    Environment,
    RunRecord,
    as_logged,
    read_environment,
    read_record,
    write_record,
)
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import DATASET, ENDED, JobRecord
from resources.metadata.outbox import now_ms
from resources.metadata.sweeps import START_KEY
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.metadata.tracking.run_alerts import tell_incidents
from resources.metadata.tracking.run_data import COMMIT_TAG, RunData
from resources.resume import settle

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


@dataclass(frozen=True)
class Plan:
    """What a training job works with, once its names are resolved."""

    job: JobRecord
    version: DatasetVersion
    record: RunRecord
    run: Artifact
    splits: Mapping[str, Artifact]


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
        pool=POOL,
        code_version="1",
    )
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
    config = {"name": model, "model": model, **given}
    job = control_plane.jobs.submit(
        name=config["name"],
        config=config,
        user="dagster",
        organization=DEFAULT_ORGANIZATION,
        id=run_id,
        status="running",
    )
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


def as_given(job: JobRecord, given: Mapping[str, Any]) -> str | None:
    """The dataset of a job; its name alone, where the launchpad gives that: which version it was is pinned by now."""
    reference = job.config.get(DATASET)
    name = str(reference).partition("@")[0]
    return name if name == given.get(DATASET) else reference


def make_plan(model: ModelDefinition, run_id: str, control_plane: ControlPlane) -> Plan:
    """Resolve dataset, recipe and environment; of a run that was started before, from its record.

    Raises:
        BadConfiguration: unknown recipe, a parameter that does not fit it, a job that cannot fit its memory, or a dataset
            that a check blocks, or whose records its objective cannot learn from; a record that was changed since.
    """
    job = control_plane.jobs.read(run_id)
    known = control_plane.store.find(f"s3://hanzo-ml/runs/{run_id}/record")
    if known is not None:
        try:
            found = read_record(control_plane.store, known)
        except BrokenArtifact as broken:
            raise BadConfiguration(str(broken)) from None
        reference, recipe = found.dataset, found.recipe
    else:
        reference, recipe = wanted(model, job.config)
        asked = recipe.on(job.resumed.gpus) if job.resumed.gpus else recipe
        refuse_what_does_not_fit(asked, shape_of_base(asked, control_plane.store))
    version = control_plane.datasets.read(reference, job.organization)
    if known is None:
        refuse_what_cannot_be_learned(recipe, version)
    if known is None and (blocked := control_plane.validations.read_blocked(version.id)):
        raise BadConfiguration(f"{blocked}: see `hanzo-ml dataset check {version.reference}`")
    return plan_of(model, job, version, recipe, control_plane.store)


def wanted(model: ModelDefinition, config: Mapping[str, Any]) -> tuple[str, Recipe]:
    """The dataset reference and the recipe that a job asks for; the definition's own where it does not say.

    Raises:
        BadConfiguration: unknown recipe or a parameter that does not fit it.
    """
    recipe = Recipe.named(config.get("recipe") or model.recipe).changed(config.get("parameters") or {})
    return str(config.get("dataset") or model.dataset), recipe


def refuse_what_does_not_fit(recipe: Recipe, shape: Architecture | None) -> None:
    """What is refused at submission where the recipe is known there: here also that of a definition, and after a click.

    Raises:
        BadConfiguration: with the nearest recipe that fits.
    """
    try:
        admit(recipe, shape)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def refuse_what_cannot_be_learned(recipe: Recipe, version: DatasetVersion) -> None:
    """Raises BadConfiguration: the objective takes other records than the dataset has."""
    try:
        admit_dataset(recipe, version)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def plan_of(model: ModelDefinition, job: JobRecord, version: DatasetVersion, recipe: Recipe, store: Store) -> Plan:
    """The plan of a run whose names are resolved. Its record is written to `store`, the only thing that changes."""
    splits = {name: version.split(name) for name in ("train", "validation", "test")}
    described = RunRecord(
        run_id=job.id,
        model=model.name,
        dataset=version.reference,
        recipe=recipe,
        seed=recipe.seed,
        environment=read_environment(SOURCE),
    )
    run = write_record(store, described, {name: splits[name].digest for name in ("train", "validation")})
    return Plan(job=job, version=version, record=read_record(store, run), run=run, splits=splits)


def training_job(plan: Plan, control_plane: ControlPlane) -> Job:
    """What compute is handed. Raises BadConfiguration: the recipe cannot be trained on as many GPUs as are asked for."""
    run_id, recipe, resumed = plan.record.run_id, plan.record.recipe, plan.job.resumed
    shape = recipe.on(resumed.gpus) if resumed.gpus else recipe
    return Job(
        id=run_id,
        program=Program.TRAIN,
        inputs={
            "run": plan.run,
            "train": plan.splits["train"],
            "validation": plan.splits["validation"],
            **start_of(plan.job),
        },
        parameters={"recipe": recipe.model_dump(mode="json")} | repeats_of(plan.record) | sent_back_of(plan.job),
        outputs={
            "checkpoints": f"s3://hanzo-ml/checkpoints/{run_id}",
            recipe.trained_role: f"s3://hanzo-ml/runs/{run_id}/checkpoint-final/{recipe.trained_role}",
        },
        result_uri=f"s3://hanzo-ml/runs/{run_id}/train.json",
        store=control_plane.settings.store,
        work_dir=control_plane.work_dir(run_id, "train"),
        cache_dir=control_plane.cache_dir,
        tracking=Tracking(uri=control_plane.settings.tracking_uri, run_id=run_id),
        hardware=plan.record.hardware.model_copy(update={"gpus": shape.hardware.gpus}),
        distributed=shape.distributed,
        checkpoint=recipe.checkpoint.under(plan.job.schedule),
        schedule=plan.job.schedule,
    )


def repeats_of(record: RunRecord) -> dict[str, JsonValue]:
    """The parameter of a replay. Jobs that repeat nothing keep their digests."""
    return {"repeats": [incident.model_dump(mode="json") for incident in record.repeats]} if record.repeats else {}


def sent_back_of(job: JobRecord) -> dict[str, JsonValue]:
    """A part of the work: what the program had made before it was sent back is no result of this."""
    back = job.resumed.sent_back
    return {"sent_back": [each.model_dump(mode="json") for each in back]} if back else {}


def start_of(job: JobRecord) -> dict[str, Artifact]:
    """The weights that a run starts from where it is given any: those of another trial of its sweep."""
    return {START_KEY: Artifact.model_validate(job.config[START_KEY])} if START_KEY in job.config else {}


def log_params(plan: Plan, control_plane: ControlPlane) -> None:
    """The run's parameters under the specification's names (row E2), and those that its job gave; its code (row E11)."""
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
        params=[(key, as_logged(value)) for key, value in values.items()],
        tags=[*([] if commit == NO_COMMIT else [(COMMIT_TAG, commit)]), *code_tags(plan.record.environment)],
    )


def is_plain(value: object) -> bool:
    """Whether it is a scalar, or a list of them."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | int | float | str | None) for each in values)


def complete(plan: Plan, job: Job, result: Result, control_plane: ControlPlane) -> None:
    """Job, run, what it used, lineage and events in one transaction; before it, what the tracking server did not get."""
    made = {"run": plan.run, **plan.splits, **result.artifacts}
    facts = TrainingFacts.model_validate(result.facts)
    if facts.unsent_metrics:
        log_unsent(job.id, folder_of(job), control_plane)
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


def code_tags(environment: Environment) -> list[tuple[str, str]]:
    """What the run page shows of the code, from the start on: of a run that fails one wants to know it most. The record has
    the whole of it.
    """
    code = {"lock_sha256": environment.lock_sha256, "git_dirty": str(environment.git_dirty).lower()}
    return [(f"environment/{key}", value) for key, value in code.items()]


def tell_healed(run_id: str, control_plane: ControlPlane) -> None:
    """What the program of a run that has failed had tried before."""
    incidents = read_incidents(control_plane.store, f"s3://hanzo-ml/checkpoints/{run_id}")
    with control_plane.database.write() as connection:
        tell_incidents(connection, run_id, incidents.entries)
