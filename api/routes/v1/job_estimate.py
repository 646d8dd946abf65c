"""POST /v1/jobs/estimate (rows D2, L8, Z26): what a job would need, from the body that would submit it."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from api.auth.permissions import Caller
from api.dependencies import CallerOf, DatabaseOf, SettingsOf, StoreOf
from api.routes.v1.job_submission import (
    DEFAULT_RECIPE,
    SANDBOX,
    NewJob,
    allow_base_model,
    changed,
    recipe_named,
    refuse_incomplete,
)
from api.strict_json import StrictRoute
from recipes.checkpoint_size import disk_words
from recipes.fit import Fit, hardware_words
from recipes.recipe import Recipe
from recipes.store import BrokenArtifact, Store
from recipes.training.trainable import missing
from resources.estimate.admission import admit, admit_dataset
from resources.estimate.estimate import COMPUTE_OPTIMAL, DatasetTokens, Estimate, estimate
from resources.estimate.past_runs import params_of_newest, past_runs
from resources.estimate.shapes import is_assumed, shape_of_base
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion

router = APIRouter(prefix="/v1/jobs", tags=["v1"], route_class=StrictRoute)


@router.post("/estimate")
def estimate_job(body: NewJob, database: DatabaseOf, store: StoreOf, settings: SettingsOf, caller: CallerOf) -> Response:
    """Tokens, steps, memory, hours and dollars of a job. Refused where the job would be refused."""
    refuse_incomplete(body)
    body, notes = completed(body, database, caller)
    base = recipe_named(body.recipe)
    recipe = changed(base, body.parameters)
    allow_base_model(settings, recipe, base)
    shape = shape_of_base(recipe, store)
    memory = admit(recipe, shape)
    if problem := missing(recipe):
        notes.append(problem)
    if is_assumed(recipe):
        notes.append(f"the shape of {recipe.base_model.uri} is assumed; give `architecture` in the parameters to correct it")
    version = Datasets(database).read(body.dataset, caller.organization) if body.dataset is not None else None
    if version and (body.recipe or body.model == SANDBOX):
        admit_dataset(recipe, version)
    found = estimate(
        recipe,
        shape,
        memory=memory,
        dataset=tokens_of(version, recipe, store) if version else None,
        past=past_runs(database, recipe, shape, caller.organization),
        prices=settings.prices.gpu_hour,
        notes=notes,
    )
    return JSONResponse(as_json(found))


def completed(body: NewJob, database: Database, caller: Caller) -> tuple[NewJob, list[str]]:
    """The body with the recipe and the dataset of its model definition, as the newest run of that used them."""
    if body.model == SANDBOX or (body.recipe and body.dataset):
        return body, []
    used = params_of_newest(database, body.model, caller.organization)
    if "recipe" not in used:
        note = f"model '{body.model}' has no run yet that says which recipe it has: estimated with {DEFAULT_RECIPE}"
        return body, [] if body.recipe else [note]
    filled = {"recipe": body.recipe or used["recipe"], "dataset": body.dataset or used.get("dataset")}
    return body.model_copy(update=filled), []


def tokens_of(version: DatasetVersion, recipe: Recipe, store: Store) -> DatasetTokens | None:
    # Tokenizers and templates are a part of a server's start that it need not wait for.
    from resources.estimate.dataset_tokens import dataset_tokens

    try:
        return dataset_tokens(version, recipe, store)
    except (BrokenArtifact, FileNotFoundError):  # whoever trains on it is told; here it is not known
        return None


def as_json(found: Estimate) -> dict[str, Any]:
    """Sizes in bytes, `null` where too little is known."""
    recipe = found.recipe
    return {
        "recipe": recipe.name,
        "method": recipe.method,
        "objective": recipe.objective,
        "base_model": recipe.base_model.uri,
        "hardware": hardware_words(recipe),
        "gpus": found.gpus,
        "steps": found.steps,
        "tokens": found.tokens,
        "tokens_per_step": recipe.tokens_per_step,
        "dataset": asdict(found.dataset) if found.dataset else None,
        "epochs": found.epochs,
        "trained_parameters": found.trained,
        "tokens_per_parameter": found.tokens_per_parameter,
        "compute_optimal_tokens_per_parameter": COMPUTE_OPTIMAL,
        "memory": memory_json(found.memory) if found.memory else None,
        "checkpoint_bytes": found.checkpoint,
        "disk": disk_words(recipe, found.checkpoint) if found.checkpoint is not None else None,
        "hours": asdict(found.hours) if found.hours else None,
        "dollars": asdict(found.dollars) if found.dollars else None,
        "source": found.source,
        "past_runs": [{"run_id": run.run_id, "tokens_per_second": run.tokens_per_second} for run in found.past_runs],
        "seed_estimate": {"time": recipe.estimated_time, "cost": recipe.estimated_cost},
        "notes": list(found.notes),
    }


def memory_json(found: Fit) -> dict[str, Any]:
    return {
        "needed": found.needed,
        "available": found.available,
        "where": found.where,
        "parts": asdict(found.budget),
    }
