"""What a run is made of, brought to this machine: the base model's files, its tokenizer, and the rows of both splits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.contracts.job import BadConfiguration, Job
from recipes.contracts.recipe import Recipe
from recipes.export import base_model
from recipes.planning.recipe_checks import refuse_too_long
from recipes.storage.artifact_store import Store
from recipes.storage.manifest import Artifact
from recipes.training.objectives import objective_of
from recipes.training.objectives.given import rows_given
from recipes.training.objectives.objective import Objective, Rows
from recipes.training.parallel.process_group import Group

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Material:
    """`folder` holds the files of `base`; `rows` are by the name of their split."""

    base: Artifact
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    rows: Mapping[str, Rows]


def gather(job: Job, recipe: Recipe, group: Group, store: Store) -> Material:
    """Raises BadConfiguration: the base model or the data are not what the recipe says, or do not fit it."""
    cache = Path(job.cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    with group.one_fetches():
        base = base_model.resolve(recipe.base_model, store, cache)
        # What is 144 GB of a 72B model is hashed by one, and not by all who wait for it. Rows are by whoever makes them.
        folder = store.fetch(base, cache) if group.local_rank == 0 else store.fetched(base, cache)
        for split in SPLITS if group.local_rank == 0 and group.on_this_node > 1 else ():
            store.fetch(job.inputs[split], cache)
    refuse_too_long(recipe, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    objective = objective_of(recipe)
    rows = {split: rows_of(split, job, objective, tokenizer, store) for split in SPLITS}
    return Material(base, folder, tokenizer, objective, rows)


def rows_of(split: str, job: Job, objective: Objective, tokenizer: PreTrainedTokenizerBase, store: Store) -> Rows:
    try:
        return rows_given(objective, objective.rows(job.inputs[split], store, Path(job.cache_dir), tokenizer))
    except BadConfiguration as problem:
        raise BadConfiguration(f"the {split} split: {problem}") from None
