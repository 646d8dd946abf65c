"""The quality gate: thresholds that accept or quarantine an evaluated model."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from recipes.contracts.frozen_model import FrozenModel


class GatePolicy(FrozenModel):
    """The requirements for registering a model in staging.

    `max_regression` is the share by which a score may be worse than the last accepted version's.
    """

    min_accuracy: float = Field(0.0, ge=0, le=1)
    max_perplexity: float | None = Field(None, gt=0)
    max_regression: float = Field(0.02, ge=0)


class GateVerdict(BaseModel, frozen=True):
    """Whether a model may go to staging; `reasons` has one line per broken rule."""

    accepted: bool
    reasons: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return "accepted" if self.accepted else "; ".join(self.reasons)


def apply_gate(scores: Mapping[str, Mapping[str, Any]], policy: GatePolicy) -> GateVerdict:
    """Compare the tuned model with the base model, the policy and the last accepted version.

    Args:
        scores: `base`, `tuned` and optionally `accepted`, each with `loss`, `perplexity` and `accuracy`; null means not
            finite.
    """
    tuned, base, accepted = scores["tuned"], scores["base"], scores.get("accepted")
    if unknown := [name for name in ("loss", "perplexity", "accuracy") if not is_finite(tuned[name])]:
        # Every comparison with NaN is false, so no rule would be broken.
        return GateVerdict(
            accepted=False, reasons=tuple(f"the tuned model's {name} is not a finite number" for name in unknown)
        )
    reasons = []
    if base["perplexity"] is not None and tuned["perplexity"] > base["perplexity"]:
        reasons.append(f"perplexity {tuned['perplexity']:.3f} is worse than the base model's {base['perplexity']:.3f}")
    if tuned["accuracy"] < base["accuracy"]:
        reasons.append(f"accuracy {tuned['accuracy']:.3f} is worse than the base model's {base['accuracy']:.3f}")
    if tuned["accuracy"] < policy.min_accuracy:
        reasons.append(f"accuracy {tuned['accuracy']:.3f} is below the required {policy.min_accuracy:.3f}")
    if policy.max_perplexity is not None and tuned["perplexity"] > policy.max_perplexity:
        reasons.append(f"perplexity {tuned['perplexity']:.3f} is above the allowed {policy.max_perplexity:.3f}")
    if accepted:
        before = accepted["perplexity"]
        if is_finite(before) and tuned["perplexity"] > before * (1 + policy.max_regression):
            reasons.append(describe_regression("perplexity", tuned["perplexity"], before, policy))
        if tuned["accuracy"] < accepted["accuracy"] * (1 - policy.max_regression):
            reasons.append(describe_regression("accuracy", tuned["accuracy"], accepted["accuracy"], policy))
    return GateVerdict(accepted=not reasons, reasons=tuple(reasons))


def is_finite(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def describe_regression(name: str, now: float, before: float, policy: GatePolicy) -> str:
    return f"{name} {now:.3f} is more than {policy.max_regression:.0%} worse than the last accepted version's {before:.3f}"
