"""Resolve what a training job works with, and build its job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import JsonValue

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.contracts.job import BadConfiguration, Job, Program, Tracking
from recipes.contracts.recipe import Recipe
from recipes.contracts.recipe_references import BaseModelRef
from recipes.planning.architecture import Architecture
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.base_model_folder import verify_model_folder
from recipes.storage.manifest import Artifact
from resources.errors import ErrorCode, HanzoError
from resources.estimate.admission import admit_dataset, admit_recipe, base_model_shape
from resources.hpo.sweeps import START_KEY
from resources.installation import SOURCE
from resources.jobs.sandbox import SANDBOX
from resources.lineage.run_record import RunRecord, read_environment, read_record, write_record
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.model_names import checked_model_name

# What a training job works with: its names resolved, to a version of a dataset, a recipe and the code; of a run that was
# started before, as its record has them.


class ModelDefaults(Protocol):
    """What a training job takes from its model's definition where it does not say. A `ModelDefinition` has these."""

    @property
    def name(self) -> str: ...

    @property
    def dataset(self) -> str: ...

    @property
    def recipe(self) -> str: ...


@dataclass(frozen=True)
class TrainingPlan:
    """What a training job works with, once its names are resolved."""

    job: JobRecord
    version: DatasetVersion
    record: RunRecord
    run: Artifact
    splits: Mapping[str, Artifact]


def make_training_plan(model: ModelDefaults, run_id: str, control_plane: ControlPlane) -> TrainingPlan:
    """Resolve dataset, recipe and environment; of a run that was started before, from its record.

    Raises:
        BadConfiguration: unknown recipe or dataset, a parameter that does not fit it, a job that cannot fit its memory, a
            name that no model can have, a dataset that a check blocks, or whose records its objective cannot learn from, or
            a base model of other bytes than it pins; a record that was changed since.
    """
    job = control_plane.jobs.read(run_id)
    known = control_plane.store.find(uris.run_record(run_id))
    if known is not None:
        try:
            found = read_record(control_plane.store, known)
        except BrokenArtifact as broken:
            raise BadConfiguration(str(broken)) from None
        reference, recipe = found.dataset, found.recipe
    else:
        check_launch(model, job)
        reference, recipe = resolve_recipe_and_dataset(model, job.config)
        asked = recipe.for_processes(job.resumed.gpus) if job.resumed.gpus else recipe
        check_hardware_fit(asked, base_model_shape(asked, control_plane.store))
    version = find_version(reference, job, control_plane)
    if known is None:
        check_dataset_layout(recipe, version)
    if known is None and (blocked := control_plane.validations.read_blocked(version.id)):
        raise BadConfiguration(f"{blocked}: see `hanzo-ml dataset check {version.reference}`")
    if known is None:
        check_base_model(recipe.base_model, control_plane.store)
    return build_plan(model, job, version, recipe, control_plane.store)


def resolve_recipe_and_dataset(model: ModelDefaults, config: Mapping[str, Any]) -> tuple[str, Recipe]:
    """The dataset reference and the recipe that a job asks for; the definition's own where it does not say.

    Raises:
        BadConfiguration: unknown recipe or a parameter that does not fit it.
    """
    recipe = Recipe.named(config.get("recipe") or model.recipe).changed(config.get("parameters") or {})
    return str(config.get("dataset") or model.dataset), recipe


def check_launch(model: ModelDefaults, job: JobRecord) -> None:
    """What is refused at submission, and the launchpad asks of nobody.

    Raises:
        BadConfiguration: a run in the sandbox is of no dataset, or has a name that no version could get after it.
    """
    if model.name != SANDBOX:
        return
    if not job.config.get("dataset"):
        raise BadConfiguration("the sandbox has no dataset of its own: give `dataset` in the launchpad, to a new partition")
    try:
        checked_model_name(job.name)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def find_version(reference: str, job: JobRecord, control_plane: ControlPlane) -> DatasetVersion:
    """Raises BadConfiguration: there is none."""
    try:
        return control_plane.datasets.read(reference, job.organization)
    except HanzoError as refused:
        if refused.code is ErrorCode.RESOURCE_DOES_NOT_EXIST:
            raise BadConfiguration(refused.message) from None
        raise


def check_hardware_fit(recipe: Recipe, shape: Architecture | None) -> None:
    """What is refused at submission where the recipe is known there: here also that of a definition, and after a click.

    Raises:
        BadConfiguration: with the nearest recipe that fits.
    """
    try:
        admit_recipe(recipe, shape)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def check_base_model(reference: BaseModelRef, store: Store) -> None:
    """Hash a folder of this machine that no job has used yet: the program would find out with the GPUs in its hands. A
    package, and a folder that only pods see, it still does: their bytes are not here.

    Raises:
        BadConfiguration: the folder lacks something, or has other bytes than the recipe pins.
    """
    uri = reference.artifact_uri
    if uri and reference.is_folder and reference.folder.is_dir() and store.find(uri) is None:
        verify_model_folder(reference)


def check_dataset_layout(recipe: Recipe, version: DatasetVersion) -> None:
    """Raises BadConfiguration: the objective takes other records than the dataset has."""
    try:
        admit_dataset(recipe, version)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def build_plan(model: ModelDefaults, job: JobRecord, version: DatasetVersion, recipe: Recipe, store: Store) -> TrainingPlan:
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
    return TrainingPlan(job=job, version=version, record=read_record(store, run), run=run, splits=splits)


def training_job(plan: TrainingPlan, control_plane: ControlPlane) -> Job:
    """What compute is handed. Raises BadConfiguration: the recipe cannot be trained on as many GPUs as are asked for."""
    run_id, recipe, resumed = plan.record.run_id, plan.record.recipe, plan.job.resumed
    shape = recipe.for_processes(resumed.gpus) if resumed.gpus else recipe
    return Job(
        id=run_id,
        program=Program.TRAIN,
        inputs={
            "run": plan.run,
            "train": plan.splits["train"],
            "validation": plan.splits["validation"],
            **starting_weights(plan.job),
        },
        parameters={"recipe": recipe.model_dump(mode="json")} | repeat_parameters(plan.record) | rewind_parameters(plan.job),
        outputs={
            "checkpoints": uris.run_checkpoints(run_id),
            recipe.trained_role: uris.final_checkpoint(run_id, recipe.trained_role),
        },
        result_uri=uris.run_result(run_id, "train"),
        store=control_plane.settings.store,
        cache_dir=control_plane.cache_dir,
        tracking=Tracking(uri=control_plane.settings.tracking_uri, run_id=run_id),
        hardware=plan.record.hardware.model_copy(update={"gpus": shape.hardware.gpus}),
        distributed=shape.distributed,
        checkpoint=recipe.checkpoint.for_schedule(plan.job.schedule),
        schedule=plan.job.schedule,
        rendering=plan.record.rendering,
        env=dict(plan.job.env),
        pod=plan.job.pod,
    )


def repeat_parameters(record: RunRecord) -> dict[str, JsonValue]:
    """The parameter of a replay. Jobs that repeat nothing keep their digests."""
    return {"repeats": [incident.model_dump(mode="json") for incident in record.repeats]} if record.repeats else {}


def rewind_parameters(job: JobRecord) -> dict[str, JsonValue]:
    """A part of the work: what the program had made before it was sent back is no result of this."""
    back = job.resumed.sent_back
    return {"sent_back": [each.model_dump(mode="json") for each in back]} if back else {}


def starting_weights(job: JobRecord) -> dict[str, Artifact]:
    """The weights that a run starts from where it is given any: those of another trial of its sweep."""
    return {START_KEY: Artifact.model_validate(job.config[START_KEY])} if START_KEY in job.config else {}
