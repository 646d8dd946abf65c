"""POST /v1/jobs/estimate: estimate the needs of a job from the body that would submit it."""

from typing import Literal

from typing_extensions import TypedDict

from api.auth.permissions import Caller, Permission
from api.dependencies import CallerDep, DatabaseDep, SettingsDep, StoreDep
from api.json_bodies import TypedResponse, json_response
from api.routing import Router
from recipes.contracts.recipe import Recipe
from recipes.planning.hardware_fit import HardwareFit, describe_disk_usage, describe_hardware
from recipes.planning.memory_budget import MemoryBudget
from recipes.planning.recipe_checks import unsupported_reason
from recipes.planning.throughput import Range
from recipes.storage.artifact_store import BrokenArtifact, Store
from resources.estimate.admission import admit_dataset, admit_recipe, base_model_shape, is_shape_assumed
from resources.estimate.job_estimate import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER, DatasetTokens, Estimate
from resources.estimate.job_estimate import estimate_job as estimate
from resources.estimate.past_runs import find_past_runs, newest_run_params
from resources.jobs.sandbox import SANDBOX
from resources.jobs.submission import (
    DEFAULT_RECIPE,
    NewJob,
    allow_base_model,
    find_recipe,
    refuse_incomplete,
    with_parameters,
)
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion


class NeededMemory(TypedDict):
    """Memory of one GPU or of the host (`where`); `available` is null for unknown hardware."""

    needed: float
    available: float | None
    where: str
    parts: MemoryBudget


class MeasuredRun(TypedDict):
    run_id: str
    tokens_per_second: float


class SeedEstimate(TypedDict):
    """Estimate from the recipe's file; empty without one."""

    time: str
    cost: str


class JobEstimate(TypedDict):
    """`source` is the basis of the hours, `notes` lists unknowns and assumptions.

    For pairs, `tokens` assumes the dataset's average; `tokens_per_step` is the maximum of a step. `disk` says how many
    checkpoints it must hold.
    """

    recipe: str
    method: Literal["full", "lora", "qlora"]
    objective: str
    base_model: str
    hardware: str
    gpus: int
    steps: int
    tokens: int
    tokens_per_step: int
    dataset: DatasetTokens | None
    epochs: float | None
    trained_parameters: int | None
    tokens_per_parameter: float | None
    compute_optimal_tokens_per_parameter: float
    memory: NeededMemory | None
    checkpoint_bytes: int | None
    disk: str | None
    hours: Range | None
    dollars: Range | None
    source: str
    past_runs: list[MeasuredRun]
    seed_estimate: SeedEstimate
    notes: list[str]


router = Router("/v1/jobs", tag="v1")


@router.post("/estimate", Permission.JOBS_READ, read_only=True)
def estimate_job(
    body: NewJob, database: DatabaseDep, store: StoreDep, settings: SettingsDep, caller: CallerDep
) -> TypedResponse[JobEstimate]:
    """Estimate tokens, steps, memory, hours and dollars of a job; refuse what submission would."""
    refuse_incomplete(body)
    body, notes = with_definition_defaults(body, database, caller)
    base = find_recipe(body.recipe)
    recipe = with_parameters(base, body.parameters)
    allow_base_model(settings, recipe, base)
    shape = base_model_shape(recipe, store)
    memory = admit_recipe(recipe, shape)
    if problem := unsupported_reason(recipe):
        notes.append(problem)
    if is_shape_assumed(recipe):
        notes.append(f"the shape of {recipe.base_model.uri} is assumed; give `architecture` in the parameters to correct it")
    version = Datasets(database).read(body.dataset, caller.organization) if body.dataset is not None else None
    if version and (body.recipe or body.model == SANDBOX):
        admit_dataset(recipe, version)
    found = estimate(
        recipe,
        shape,
        memory=memory,
        dataset=count_dataset_tokens(version, recipe, store) if version else None,
        past=find_past_runs(database, recipe, shape, caller.organization),
        prices=settings.prices.gpu_hour,
        notes=notes,
    )
    return json_response(estimate_json(found))


def with_definition_defaults(body: NewJob, database: Database, caller: Caller) -> tuple[NewJob, list[str]]:
    """Add the recipe and dataset of the model definition's newest run to the body."""
    if body.model == SANDBOX or (body.recipe and body.dataset):
        return body, []
    used = newest_run_params(database, body.model, caller.organization)
    if "recipe" not in used:
        note = f"model '{body.model}' has no run yet to take the recipe from: estimated with {DEFAULT_RECIPE}"
        return body, [] if body.recipe else [note]
    filled = {"recipe": body.recipe or used["recipe"], "dataset": body.dataset or used.get("dataset")}
    return body.model_copy(update=filled), []


def count_dataset_tokens(version: DatasetVersion, recipe: Recipe, store: Store) -> DatasetTokens | None:
    # Imported late: tokenizers and templates would slow the server's start.
    from resources.estimate.token_count import count_dataset_tokens as dataset_tokens

    try:
        return dataset_tokens(version, recipe, store)
    except (BrokenArtifact, FileNotFoundError):  # training would report it; for an estimate the count is unknown
        return None


def estimate_json(found: Estimate) -> JobEstimate:
    """Convert an estimate to JSON: sizes in bytes, null for unknown values."""
    recipe = found.recipe
    return {
        "recipe": recipe.name,
        "method": recipe.method,
        "objective": recipe.objective,
        "base_model": recipe.base_model.uri,
        "hardware": describe_hardware(recipe),
        "gpus": found.gpus,
        "steps": found.steps,
        "tokens": found.tokens,
        "tokens_per_step": recipe.tokens_per_step,
        "dataset": found.dataset,
        "epochs": found.epochs,
        "trained_parameters": found.trained,
        "tokens_per_parameter": found.tokens_per_parameter,
        "compute_optimal_tokens_per_parameter": COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER,
        "memory": memory_json(found.memory) if found.memory else None,
        "checkpoint_bytes": found.checkpoint,
        "disk": describe_disk_usage(recipe, found.checkpoint) if found.checkpoint is not None else None,
        "hours": found.hours,
        "dollars": found.dollars,
        "source": found.source,
        "past_runs": [{"run_id": run.run_id, "tokens_per_second": run.tokens_per_second} for run in found.past_runs],
        "seed_estimate": {"time": recipe.estimated_time, "cost": recipe.estimated_cost},
        "notes": list(found.notes),
    }


def memory_json(found: HardwareFit) -> NeededMemory:
    return {
        "needed": found.needed,
        "available": found.available,
        "where": found.where,
        "parts": found.budget,
    }
