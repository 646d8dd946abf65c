"""Pipeline parallelism: a model cut into stages of whole layers, one for each process (row H4). Pure.

The first stage has the embedding, the last the norm and the head. A step's micro-batches go through them one after the other
(GPipe, Huang et al. 2019), and where there are at least as many as stages, backwards as soon as they can (1F1B, Narayanan
et al. 2019), so that a stage holds activations of as many as there are stages from it on, and not of all.
"""

import re
from dataclasses import dataclass

from recipes.contracts.recipe import Recipe
from recipes.counted import counted
from recipes.planning.architecture import Architecture, Tensors

OF_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")


@dataclass(frozen=True)
class Stage:
    """What one stage has of a model. A `tied` head is the embedding: then the last stage has a copy of that."""

    layers: range
    first: bool
    last: bool
    tied: bool

    @property
    def embeds(self) -> bool:
        return self.first or (self.last and self.tied)

    def has(self, name: str) -> bool:
        """Whether a weight of that name is one of its own."""
        if found := OF_LAYER.search(name):
            return int(found[1]) in self.layers
        return self.embeds if "embed_tokens." in name else self.last


class StageShape(Architecture):
    """The shape of one stage: its own layers, how many matrices as large as the embedding, and whether the head is there."""

    embeddings: int
    heads: bool

    @property
    def root(self) -> tuple[Tensors, ...]:
        embedding = Tensors("embed_tokens", self.vocab_size * self.hidden_size, self.embeddings)
        norm = Tensors("norm", self.hidden_size)
        return (*((embedding,) if self.embeddings else ()), *((norm,) if self.heads else ()))


def stage_of(rank: int, stages: int, layers: int, *, tied: bool) -> Stage:
    """As many layers in each, or one more in those of the middle: the ends have the embedding and the head besides."""
    each, more = divmod(layers, stages)
    longer = (stages - more) // 2
    first, stop = (each * place + min(max(place - longer, 0), more) for place in (rank, rank + 1))
    return Stage(
        layers=range(first, stop),
        first=rank == 0,
        last=rank == stages - 1,
        tied=tied,
    )


def stage_shapes(recipe: Recipe, shape: Architecture) -> list[StageShape]:
    """Of every stage, in their order."""
    found = []
    for rank in range(recipe.stages):
        stage = stage_of(rank, recipe.stages, shape.num_hidden_layers, tied=shape.tie_word_embeddings)
        own = {"num_hidden_layers": len(stage.layers), "head_dim": shape.head_size}
        ends = {"embeddings": stage.embeds + (stage.last and not stage.tied), "heads": stage.last}
        found.append(StageShape.model_validate(shape.model_dump() | own | ends))
    return found


def runs_1f1b(recipe: Recipe) -> bool:
    return recipe.gradient_accumulation >= recipe.stages


def micro_batches_held(recipe: Recipe, rank: int) -> int:
    """Of how many micro-batches a stage has activations at once."""
    return recipe.stages - rank if runs_1f1b(recipe) else recipe.gradient_accumulation


def share_at_work(recipe: Recipe) -> float:
    """The part of a step in which a stage computes: it waits for its first micro-batch, and for others after its last."""
    return recipe.gradient_accumulation / (recipe.gradient_accumulation + recipe.stages - 1)


def untried(recipe: Recipe, shape: Architecture | None) -> str | None:
    """What keeps a recipe from it, with a base model of that shape where it is known; none where nothing does."""
    if not recipe.in_stages:
        return None
    if recipe.objective != "sft":
        return f"strategy pipeline has not been tried with objective {recipe.objective}: use sft, or another strategy"
    if recipe.method == "qlora":
        return "strategy pipeline has not been tried beside weights in NF4: use ddp, or method lora"
    if recipe.optimizer != "adamw":
        return f"strategy pipeline keeps the moments of adamw, and not those of {recipe.optimizer}: use optimizer adamw"
    if recipe.samples_per_step != recipe.places_per_step:
        return "strategy pipeline has micro-batches of equally many rows: leave out rows_per_step"
    if shape and recipe.stages > shape.num_hidden_layers:
        layers = shape.num_hidden_layers
        return (
            f"strategy pipeline cuts the base model's {counted(layers, 'layer')}: take {counted(layers, 'process')} at most"
        )
    return None
