"""Resolve the inputs of a training job, and build its job document."""

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

# The inputs of a training job, with names resolved to a dataset version, a recipe and code; for a run that was started
# before, taken from its record.


class ModelDefaults(Protocol):
    """What a training job inherits from its model's definition; implemented by `ModelDefinition`."""

    @property
    def name(self) -> str: ...

    @property
    def dataset(self) -> str: ...

    @property
    def recipe(self) -> str: ...


@dataclass(frozen=True)
class TrainingPlan:
    """The resolved inputs of a training job."""

    job: JobRecord
    version: DatasetVersion
    record: RunRecord
    run: Artifact
    splits: Mapping[str, Artifact]


def make_training_plan(model: ModelDefaults, run_id: str, control_plane: ControlPlane) -> TrainingPlan:
    """Resolve dataset, recipe and environment; for a resumed run, from its record.

    Raises:
        BadConfiguration: unknown recipe or dataset, invalid parameters, a job that exceeds its memory, an invalid model
            name, a dataset that a check blocks or whose records don't suit the objective, a base model that differs from its
            pinned hash, or a modified record.
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
    """Return the dataset reference and the recipe of a job, with the definition's defaults.

    Raises:
        BadConfiguration: unknown recipe or invalid parameters.
    """
    recipe = Recipe.named(config.get("recipe") or model.recipe).changed(config.get("parameters") or {})
    return str(config.get("dataset") or model.dataset), recipe


def check_launch(model: ModelDefaults, job: JobRecord) -> None:
    """Check what submission checks but the launchpad does not.

    Raises:
        BadConfiguration: a sandbox run without dataset, or with a name that is invalid for a version.
    """
    if model.name != SANDBOX:
        return
    if not job.config.get("dataset"):
        raise BadConfiguration("the sandbox has no dataset of its own: set `dataset` in the launchpad of a new partition")
    try:
        checked_model_name(job.name)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def find_version(reference: str, job: JobRecord, control_plane: ControlPlane) -> DatasetVersion:
    """Return the dataset version. Raises BadConfiguration if there is none."""
    try:
        return control_plane.datasets.read(reference, job.organization)
    except HanzoError as refused:
        if refused.code is ErrorCode.RESOURCE_DOES_NOT_EXIST:
            raise BadConfiguration(refused.message) from None
        raise


def check_hardware_fit(recipe: Recipe, shape: Architecture | None) -> None:
    """Check that the recipe fits its hardware.

    Submission does that only for recipes that the job names, not for a definition's or for launches in the Dagster UI.

    Raises:
        BadConfiguration: it does not; the message has the nearest recipe that fits.
    """
    try:
        admit_recipe(recipe, shape)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def check_base_model(reference: BaseModelRef, store: Store) -> None:
    """Verify the hash of a local base model that no job has used yet.

    Otherwise the program would detect a mismatch only after its GPUs are allocated. It does verify packages, and folders
    that only pods see, because their files are not here.

    Raises:
        BadConfiguration: the folder is incomplete or differs from the recipe's pinned hash.
    """
    uri = reference.artifact_uri
    if uri and reference.is_folder and reference.folder.is_dir() and store.find(uri) is None:
        verify_model_folder(reference)


def check_dataset_layout(recipe: Recipe, version: DatasetVersion) -> None:
    """Raises BadConfiguration if the objective needs another record layout than the dataset's."""
    try:
        admit_dataset(recipe, version)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def build_plan(model: ModelDefaults, job: JobRecord, version: DatasetVersion, recipe: Recipe, store: Store) -> TrainingPlan:
    """Return the plan of a run with resolved names, after writing its record to `store`."""
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
    """Return the job document. Raises BadConfiguration for an impossible number of GPUs."""
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
    """Return the parameter of a replay; other jobs have none, which keeps their digests."""
    return {"repeats": [incident.model_dump(mode="json") for incident in record.repeats]} if record.repeats else {}


def rewind_parameters(job: JobRecord) -> dict[str, JsonValue]:
    """Return a rewound job's parameter, which invalidates results from before the rewind."""
    back = job.resumed.sent_back
    return {"sent_back": [each.model_dump(mode="json") for each in back]} if back else {}


def starting_weights(job: JobRecord) -> dict[str, Artifact]:
    """Return the weights to start from, if any: those of another trial of the sweep."""
    return {START_KEY: Artifact.model_validate(job.config[START_KEY])} if START_KEY in job.config else {}
