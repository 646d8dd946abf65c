"""How large a checkpoint is, before there is one. Pure functions; figures in bytes.

Left out is what no model makes large: schedule, random states, the tokenizer's files.
"""

from recipes.contracts.recipe import Recipe
from recipes.fit import sized
from recipes.launch import fetches_share, saves_parts
from recipes.planning.architecture import Architecture
from recipes.planning.memory_budget import TRAINED, WIDTH, optimizer_bytes, trained_tensors


def checkpoint_bytes(recipe: Recipe, shape: Architecture) -> int:
    """What is trained, and what its optimizer keeps of it. How many processes save it makes no difference.

    Raises:
        BadConfiguration: an adapter's target is no module of this model.
    """
    trained = trained_tensors(recipe, shape)
    kept = "adamw" if recipe.optimizer == "paged_adamw" else recipe.optimizer  # wherever they are while it trains
    weights = sum(tensors.total for tensors in trained) * WIDTH[TRAINED]
    return weights + optimizer_bytes(kept, trained, WIDTH[TRAINED])


def disk_words(recipe: Recipe, size: int) -> str:
    """What the disks must hold: the newest and the one that is written, and what is compressed on its way to the store.

    Where each node saves a part, one that goes on fetches its share, or all.
    """
    nodes = recipe.distributed.num_nodes if recipe.distributed else 1
    here, policy = "three" if recipe.checkpoint.compression else "two", recipe.checkpoint
    store = f"the store up to {policy.keep_last + 2}"
    if nodes > 1 and saves_parts(recipe):
        more = "the first one's all weights at the end, too" if fetches_share(recipe) else "and a whole one to go on from"
        disks = f"each node's disk must hold {here} parts of {sized(size / nodes)} ({more})"
        return f"{sized(size)} a checkpoint; {disks}, {store} checkpoints"
    where = "the first node's disk" if nodes > 1 else "the disk"
    return f"{sized(size)} a checkpoint; {where} must hold {here} of them, {store}"
