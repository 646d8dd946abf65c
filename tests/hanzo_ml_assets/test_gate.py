"""The gate: each rule separately at its limit, and refusal of NaN."""

import math
from typing import Any

import pytest

from hanzo_ml_assets.gate import GatePolicy, GateVerdict, apply_gate


def scores(perplexity: float | None, accuracy: float, loss: float | None = 1.0) -> dict[str, Any]:
    return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}


BASE = scores(100.0, 0.2)
GOOD = scores(5.0, 0.9)


def verdict(
    tuned: dict[str, Any], accepted: dict[str, Any] | None = None, base: dict[str, Any] = BASE, **policy: Any
) -> GateVerdict:
    found = {"base": base, "tuned": tuned, **({"accepted": accepted} if accepted else {})}
    return apply_gate(found, GatePolicy(**policy))


def test_model_better_in_every_metric_is_accepted_without_reasons() -> None:
    assert verdict(GOOD, scores(5.1, 0.88), min_accuracy=0.5, max_perplexity=10) == GateVerdict(accepted=True)
    assert verdict(GOOD).sentence == "accepted"


def test_a_model_that_equals_its_base_is_accepted() -> None:
    assert verdict(BASE).accepted


@pytest.mark.requirement("M3", "M4", "M5", "M6")
@pytest.mark.parametrize(
    ("tuned", "accepted", "policy", "words"),
    [
        (scores(100.5, 0.9), None, {}, "perplexity 100.500 is worse than the base model's 100.000"),
        (scores(5.0, 0.19), None, {}, "accuracy 0.190 is worse than the base model's 0.200"),
        (scores(5.0, 0.49), None, {"min_accuracy": 0.5}, "accuracy 0.490 is below the required 0.500"),
        (scores(5.1, 0.9), None, {"max_perplexity": 5.0}, "perplexity 5.100 is above the allowed 5.000"),
        (scores(5.2, 0.9), scores(5.0, 0.9), {}, "perplexity 5.200 is more than 2% worse than the last accepted version's"),
        (scores(5.0, 0.8), scores(5.0, 0.9), {}, "accuracy 0.800 is more than 2% worse than the last accepted version's"),
    ],
)
def test_each_violated_rule_rejects_with_both_numbers(
    tuned: dict[str, Any], accepted: dict[str, Any] | None, policy: dict[str, Any], words: str
) -> None:
    found = verdict(tuned, accepted, **policy)
    assert not found.accepted
    assert len(found.reasons) == 1 and found.reasons[0].startswith(words)


@pytest.mark.parametrize(
    ("tuned", "accepted", "policy"),
    [
        (scores(5.0, 0.5), None, {"min_accuracy": 0.5}),
        (scores(5.0, 0.9), None, {"max_perplexity": 5.0}),
        (scores(5.1, 0.9), scores(5.0, 0.9), {"max_regression": 0.02}),
        (scores(6.0, 0.45), scores(5.0, 0.5), {"max_regression": 0.2}),
    ],
)
def test_score_exactly_at_the_limit_is_accepted(
    tuned: dict[str, Any], accepted: dict[str, Any] | None, policy: dict[str, Any]
) -> None:
    assert verdict(tuned, accepted, **policy).accepted


def test_every_broken_rule_is_named() -> None:
    found = verdict(scores(200.0, 0.1), GOOD, min_accuracy=0.5, max_perplexity=10.0)
    assert len(found.reasons) == 6
    assert found.sentence == "; ".join(found.reasons)


@pytest.mark.parametrize("field", ["loss", "perplexity"])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_nonfinite_loss_is_rejected(field: str, value: float | None) -> None:
    assert not verdict({**GOOD, field: value}).accepted
    assert not verdict({**GOOD, field: value}, GOOD).accepted


def test_nan_accuracy_is_rejected() -> None:
    assert not verdict({**GOOD, "accuracy": math.nan}, min_accuracy=0.5).accepted


def test_base_model_without_finite_loss_does_not_block_a_good_model() -> None:
    assert verdict(GOOD, base=scores(None, 0.0, None)).accepted


def test_accuracy_is_compared_even_if_the_accepted_versions_perplexity_is_unknown() -> None:
    assert not verdict(scores(5.0, 0.3), scores(None, 0.9, None)).accepted
