"""What the tracker has of a training run from its start on: its parameters, and the code that trains it."""

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.training_plan import Plan
from resources.lineage.run_record import NO_COMMIT, Environment, as_logged
from resources.metadata.run_tags import COMMIT_TAG
from resources.metadata.tracking.run_data import RunData


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


def code_tags(environment: Environment) -> list[tuple[str, str]]:
    """What the run page shows of the code, from the start on: of a run that fails one wants to know it most. The record has
    the whole of it.
    """
    code = {"lock_sha256": environment.lock_sha256, "git_dirty": str(environment.git_dirty).lower()}
    return [(f"environment/{key}", value) for key, value in code.items()]
