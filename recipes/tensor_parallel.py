"""What tensor parallelism has been tried with: each weight cut into parts, whose processes compute together (row H4)."""

from recipes.contracts.recipe import Recipe
from recipes.planning.architecture import NORMED_HEADS, Architecture


def untried(recipe: Recipe, shape: Architecture | None) -> str | None:
    """What keeps a recipe from it, with a base model of that shape where it is known; none where nothing does."""
    parts = recipe.tensor_parallel
    if parts == 1:
        return None
    if recipe.method != "full":  # PEFT 0.21 computes other gradients than one process does, or fails
        return "tensor_parallel cuts weights that are all trained: use method full, or leave it out"
    if shape is None:
        return None
    if shape.model_type in NORMED_HEADS:  # transformers 5.23 sums their gradients once for each micro-batch too often
        return f"tensor_parallel gives norms of heads wrong gradients, which {shape.model_type} has: leave it out"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(shape, name)) % parts:
            return f"tensor_parallel {parts} does not divide {name} {size} of the base model: take a number that does"
    return None
