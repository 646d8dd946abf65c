"""What a training job works with: its names resolved, to a version of a dataset, a recipe and the code; of a run that was
started before, as its record has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hanzo_ml_assets.control_plane import SOURCE, ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from recipes.contracts.job import BadConfiguration
from recipes.contracts.pinned_references import BaseModelRef
from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import Architecture
from recipes.storage import uris
from recipes.storage.artifact_store import BrokenArtifact, Store
from recipes.storage.base_model_folder import checked_folder
from recipes.storage.manifest import Artifact
from resources.errors import ErrorCode, HanzoError
from resources.estimate.admission import admit, admit_dataset
from resources.estimate.shapes import shape_of_base
from resources.jobs.sandbox import SANDBOX
from resources.lineage.run_record import RunRecord, read_environment, read_record, write_record
from resources.metadata.datasets import DatasetVersion
from resources.metadata.jobs import JobRecord
from resources.metadata.registry.model_version_rules import checked_model_name


@dataclass(frozen=True)
class Plan:
    """What a training job works with, once its names are resolved."""

    job: JobRecord
    version: DatasetVersion
    record: RunRecord
    run: Artifact
    splits: Mapping[str, Artifact]


def make_plan(model: ModelDefinition, run_id: str, control_plane: ControlPlane) -> Plan:
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
        refuse_what_a_click_left_open(model, job)
        reference, recipe = wanted(model, job.config)
        asked = recipe.on(job.resumed.gpus) if job.resumed.gpus else recipe
        refuse_what_does_not_fit(asked, shape_of_base(asked, control_plane.store))
    version = version_of(reference, job, control_plane)
    if known is None:
        refuse_what_cannot_be_learned(recipe, version)
    if known is None and (blocked := control_plane.validations.read_blocked(version.id)):
        raise BadConfiguration(f"{blocked}: see `hanzo-ml dataset check {version.reference}`")
    if known is None:
        refuse_another_base(recipe.base_model, control_plane.store)
    return plan_of(model, job, version, recipe, control_plane.store)


def wanted(model: ModelDefinition, config: Mapping[str, Any]) -> tuple[str, Recipe]:
    """The dataset reference and the recipe that a job asks for; the definition's own where it does not say.

    Raises:
        BadConfiguration: unknown recipe or a parameter that does not fit it.
    """
    recipe = Recipe.named(config.get("recipe") or model.recipe).changed(config.get("parameters") or {})
    return str(config.get("dataset") or model.dataset), recipe


def refuse_what_a_click_left_open(model: ModelDefinition, job: JobRecord) -> None:
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


def version_of(reference: str, job: JobRecord, control_plane: ControlPlane) -> DatasetVersion:
    """Raises BadConfiguration: there is none."""
    try:
        return control_plane.datasets.read(reference, job.organization)
    except HanzoError as refused:
        if refused.code is ErrorCode.RESOURCE_DOES_NOT_EXIST:
            raise BadConfiguration(refused.message) from None
        raise


def refuse_what_does_not_fit(recipe: Recipe, shape: Architecture | None) -> None:
    """What is refused at submission where the recipe is known there: here also that of a definition, and after a click.

    Raises:
        BadConfiguration: with the nearest recipe that fits.
    """
    try:
        admit(recipe, shape)
    except HanzoError as refused:
        raise BadConfiguration(refused.message) from None


def refuse_another_base(reference: BaseModelRef, store: Store) -> None:
    """Hash a folder of this machine that no job has used yet: the program would find out with the GPUs in its hands. A
    package, and a folder that only pods see, it still does: their bytes are not here.

    Raises:
        BadConfiguration: the folder lacks something, or has other bytes than the recipe pins.
    """
    uri = reference.artifact_uri
    if uri and reference.is_folder and reference.folder.is_dir() and store.find(uri) is None:
        checked_folder(reference)


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
