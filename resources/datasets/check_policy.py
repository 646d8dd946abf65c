"""Which checks a dataset must pass, as its `defs.yaml` says it: how far each may go, how bad that is, and what it stops."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.quantities import Duration


class Check(StrEnum):
    """Every check of a version. The last one is of its splits, the others are of its records."""

    CONTRACT = "contract"
    COMPLETENESS = "completeness"
    FRESHNESS = "freshness"
    DUPLICATES = "duplicates"
    NEAR_DUPLICATES = "near_duplicates"
    PERSONAL_DATA = "personal_data"
    SCHEMA_DRIFT = "schema_drift"
    DRIFT = "drift"
    BIAS = "bias"
    LEAKAGE = "leakage"


class CheckPolicy(FrozenModel):
    """One check. A blocking one that fails stops splits and training of the version."""

    severity: Literal["warn", "error"] = "warn"
    blocking: bool = False

    @model_validator(mode="after")
    def require_error_if_blocking(self) -> Self:
        if self.blocking and self.severity != "error":
            raise ValueError("a check that blocks needs `severity: error`")
        return self


class ShareCheck(CheckPolicy):
    """Passes while a share, from 0 to 1, is not above the threshold."""

    threshold: float = Field(0.0, ge=0, le=1)


class CompletenessCheck(CheckPolicy):
    """Passes while every column, or those of `columns`, is filled in at least this share of the records."""

    threshold: float = Field(0.0, ge=0, le=1)
    columns: tuple[str, ...] = ()


class FreshnessCheck(CheckPolicy):
    """Passes while the newest record, or the version where no timestamp is declared, is not older than this."""

    max_age: Duration | None = None


class DriftCheck(CheckPolicy):
    """Fails where a population stability index is above the threshold, and the test says that chance would not do it."""

    threshold: float = Field(0.2, gt=0)
    significance: float = Field(0.01, gt=0, lt=1)


class BiasCheck(CheckPolicy):
    """Fails where a slice is smaller than `min_share`, or its labels differ by more than `threshold` from those of all.

    The difference is the total variation distance: the share of labels that would have to change.
    """

    threshold: float = Field(0.3, gt=0, le=1)
    min_share: float = Field(0.0, ge=0, lt=1)


class Checks(FrozenModel):
    """`checks:` of a dataset definition."""

    contract: CheckPolicy = CheckPolicy(severity="error", blocking=True)
    completeness: CompletenessCheck = CompletenessCheck()
    freshness: FreshnessCheck = FreshnessCheck()
    duplicates: ShareCheck = ShareCheck(threshold=0.01)
    near_duplicates: ShareCheck = ShareCheck(threshold=0.1)
    personal_data: ShareCheck = ShareCheck()
    schema_drift: CheckPolicy = CheckPolicy()
    drift: DriftCheck = DriftCheck()
    bias: BiasCheck = BiasCheck()
    leakage: ShareCheck = ShareCheck()

    def policy_for(self, check: Check) -> CheckPolicy:
        policy: CheckPolicy = getattr(self, check)
        return policy
