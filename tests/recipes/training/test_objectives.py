"""Objectives: losses compared with written-out formulas, accepted records, and a run of each."""

import math
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recipes.training.objectives as registry
from recipes.contracts import recipe_references
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.records.record_reader import parse_record
from recipes.training.data.preference_pairs import PreferencePair, collate_pairs, encode_pairs
from recipes.training.model import load_model
from recipes.training.objectives import make_objective
from recipes.training.objectives.dpo_orpo import Dpo, compute_log_odds
from recipes.training.objectives.sft import Sft
from tests.recipes.tiny_training import COLOURS, FULL, LORA, TinyTraining, losses

PAIRS: list[dict[str, Any]] = [
    {
        "prompt": f"What colour has door {number}? ",
        "chosen": f"Door {number} is {COLOURS[number % 5]}.",
        "rejected": f"I don't know {'at all ' * (number % 3)}.",
    }
    for number in range(24)
]
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"Door {number}?"},
            {"role": "assistant", "content": f"It is {COLOURS[number % 5]}."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }
    for number in range(24)
]
TEXTS: list[dict[str, Any]] = [{"text": f"Door {number} is {COLOURS[number % 5]}."} for number in range(24)]
SHORT: dict[str, Any] = LORA | {"lora_dropout": 0.0, "max_steps": 4, "eval_steps": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    return TinyTraining(tmp_path_factory.mktemp("objectives"), PAIRS)


def pairs_of(tiny: TinyTraining, recipe: Recipe) -> list[PreferencePair]:
    return encode_pairs(AutoTokenizer.from_pretrained(tiny.model), [parse_record(row) for row in PAIRS[:3]], recipe)


def answer_log_probabilities(model: Any, pair: PreferencePair) -> Iterator[list[float]]:
    """Yield log p of each answer token: the chosen answer's, then the rejected one's.

    Each is computed alone, unpadded, in float64.
    """
    for example in (pair.chosen, pair.rejected):
        with torch.no_grad():
            table = model(torch.tensor([example.tokens])).logits[0].double().log_softmax(-1)
        start = example.labels.count(-100)
        yield [float(table[place - 1, example.tokens[place]]) for place in range(start, len(example.tokens))]


def trained(tiny: TinyTraining, recipe: Recipe, seed: int) -> Any:
    """Return a model that differs from its base."""
    model = load_model(tiny.model, recipe)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.02)
    return model.eval()


@pytest.mark.parametrize("method", [LORA, FULL])
def test_dpo_loss_equals_the_formula_of_the_paper(tiny: TinyTraining, method: dict[str, Any]) -> None:
    recipe = tiny.recipe(**method, objective="dpo", beta=0.3)
    objective = make_objective(recipe)
    objective.begin(load_model(tiny.model, recipe))
    model = trained(tiny, recipe, seed=3)
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32).eval()
    pairs = pairs_of(tiny, recipe)
    expected, right = 0.0, 0
    rewards: list[list[float]] = [[], []]
    for pair in pairs:
        chosen, rejected = map(sum, answer_log_probabilities(model, pair))
        base_chosen, base_rejected = map(sum, answer_log_probabilities(base, pair))
        for of_all, reward in zip(rewards, (chosen - base_chosen, rejected - base_rejected), strict=True):
            of_all.append(0.3 * reward)
        margin = rewards[0][-1] - rewards[1][-1]
        expected += math.log1p(math.exp(-margin)) / len(pairs)
        right += margin > 0
    found = objective.loss(model, collate_pairs(pairs))
    assert found is not None
    assert float(found.value) == pytest.approx(expected, rel=1e-4)
    assert found.metrics["reward_accuracy"] == pytest.approx(right / len(pairs))
    means = [sum(of_all) / len(pairs) for of_all in rewards]
    assert [found.metrics[f"reward_{name}"] for name in ("chosen", "rejected")] == pytest.approx(means, rel=1e-2, abs=1e-4)
    assert found.metrics["reward_margin"] == pytest.approx(means[0] - means[1], rel=1e-2, abs=1e-4)
    found.value.backward()
    assert all(tensor.grad is not None for tensor in model.parameters() if tensor.requires_grad)


def test_dpo_reference_is_computed_without_dropout(tiny: TinyTraining) -> None:
    """Bases such as GPT-2 and Phi-2 use dropout in training.

    The reference then differed for each micro-batch.
    """
    recipe = tiny.recipe(**LORA, objective="dpo")
    model = load_model(tiny.model, recipe)
    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_hook(lambda mlp, _, out: torch.nn.functional.dropout(out, 0.5, mlp.training))
    objective = make_objective(recipe)
    assert isinstance(objective, Dpo)
    batch = collate_pairs(pairs_of(tiny, recipe))
    expected = objective._reference(model.eval(), batch)
    assert not model.training
    assert objective._reference(model.train(), batch).equal(expected)
    assert model.training


def test_orpo_loss_equals_the_formula_of_the_paper(tiny: TinyTraining) -> None:
    recipe = tiny.recipe(**LORA, objective="orpo", beta=0.25)
    model = trained(tiny, recipe, seed=4)
    pairs = pairs_of(tiny, recipe)
    likelihood, ratio = 0.0, 0.0
    for pair in pairs:
        chosen, rejected = answer_log_probabilities(model, pair)
        likelihood += sum(chosen) / len(chosen) / len(pairs)
        p, q = (math.exp(sum(half) / len(half)) for half in (chosen, rejected))
        odds_ratio = (p / (1 - p)) / (q / (1 - q))
        ratio += math.log(1 / (1 + 1 / odds_ratio)) / len(pairs)
    found = make_objective(recipe).loss(model, collate_pairs(pairs))
    assert found is not None
    assert float(found.value) == pytest.approx(-likelihood - 0.25 * ratio, rel=1e-4)


def test_log_odds_of_a_certain_answer_are_finite_with_finite_gradient() -> None:
    certain = torch.tensor([0.0, -0.5], requires_grad=True)
    odds = compute_log_odds(certain)
    odds.sum().backward()
    assert certain.grad is not None and certain.grad.isfinite().all()
    assert odds.tolist() == pytest.approx([math.log(1e7), -0.5 - math.log(1 - math.exp(-0.5))], rel=1e-4)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_preference_loss_is_independent_of_micro_batch_size(tiny: TinyTraining, objective: str) -> None:
    """Also in a step that is split further after running out of memory."""
    recipe = tiny.recipe(**LORA, objective=objective)
    made = make_objective(recipe)
    model = trained(tiny, recipe, seed=5)
    pairs = pairs_of(tiny, recipe)
    together, *alone = (made.loss(model, collate_pairs(some)) for some in (pairs, *([pair] for pair in pairs)))
    assert together is not None
    assert float(together.value) == pytest.approx(sum(float(one.value) for one in alone if one) / len(alone), rel=1e-5)


@pytest.mark.requirement("L7", "Z23")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "method"), [("dpo", SHORT), ("dpo", FULL | {"dtype": "bfloat16", "max_steps": 4}), ("orpo", SHORT)]
)
def test_preference_training_learns_and_resumes_bit_for_bit(
    tiny: TinyTraining, objective: str, method: dict[str, Any]
) -> None:
    name = f"{objective}-{method['method']}"
    recipe = method | {"objective": objective}
    result = tiny.train(name, **recipe)
    if objective == "dpo":  # initially the model is its own reference
        assert losses(result)[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses(result)[-1] < losses(result)[0]
    tiny.lose_checkpoints(name, after=2)
    assert tiny.train(name, **recipe).artifacts == result.artifacts
    if objective == "orpo":
        scores = tiny.evaluate(name, result, **recipe).facts["report"]["scores"]  # type: ignore[call-overload, index]
        assert scores["tuned"]["loss"] < scores["base"]["loss"]
        assert scores["tuned"]["accuracy"] >= scores["base"]["accuracy"]


@pytest.mark.parametrize("rows", [CONVERSATIONS, TEXTS], ids=["messages", "text"])
def test_other_layouts_train_and_are_scored(
    tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch, rows: Sequence[dict[str, Any]]
) -> None:
    name = next(iter(rows[0]))
    monkeypatch.setattr(tiny, "splits", tiny.split(name, rows))
    result = tiny.train(name, **SHORT, objective="sft")
    scores = tiny.evaluate(name, result, **SHORT).facts["report"]["scores"]  # type: ignore[call-overload, index]
    assert scores["tuned"]["loss"] < scores["base"]["loss"]


def test_records_of_the_wrong_layout_for_an_objective_are_refused(
    tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadConfiguration, match="is for preference training"):
        tiny.train("sft-of-pairs", **SHORT)
    monkeypatch.setattr(tiny, "splits", tiny.split("texts", TEXTS))
    with pytest.raises(BadConfiguration, match="record 1 is text: objective dpo needs prompt/chosen/rejected"):
        tiny.train("dpo-of-texts", **SHORT, objective="dpo")


class Reversed(Sft):
    """A third-party objective."""


@pytest.mark.requirement("L7")
def test_installed_class_is_usable_as_objective(tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown objective: use sft, dpo, orpo"):
        tiny.recipe(**LORA, objective="reversed")
    found = EntryPoints([EntryPoint("reversed", f"{__name__}:Reversed", recipe_references.OBJECTIVES_GROUP)])
    for module in (recipe_references, registry):
        monkeypatch.setattr(module, "entry_points", lambda group: found.select(group=group))
    monkeypatch.setattr(EntryPoint, "load", lambda self: Reversed)
    assert isinstance(make_objective(tiny.recipe(**LORA, objective="reversed")), Reversed)


def test_beta_is_refused_for_non_preference_objectives(tiny: TinyTraining) -> None:
    with pytest.raises(ValueError, match="beta is a key of the preference objectives"):
        tiny.recipe(**LORA, beta=0.2)
    assert "beta" not in tiny.recipe(**LORA).model_dump()
