"""The checks of a dataset, as declared in its `defs.yaml`.

A check has a threshold and a severity, and may block further use of a version.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.quantities import Duration


class Check(StrEnum):
    """The checks of a version. LEAKAGE checks its splits, all others its records."""

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
    """The policy of a check.

    If a blocking check fails, the version is not split or trained on.
    """

    severity: Literal["warn", "error"] = "warn"
    blocking: bool = False

    @model_validator(mode="after")
    def require_error_if_blocking(self) -> Self:
        if self.blocking and self.severity != "error":
            raise ValueError("a check that blocks needs `severity: error`")
        return self


class ShareCheck(CheckPolicy):
    """Passes if a share (0 to 1) does not exceed the threshold."""

    threshold: float = Field(0.0, ge=0, le=1)


class CompletenessCheck(CheckPolicy):
    """Passes if each column has a value in at least this share of the records.

    Checks all columns if `columns` is empty.
    """

    threshold: float = Field(0.0, ge=0, le=1)
    columns: tuple[str, ...] = ()


class FreshnessCheck(CheckPolicy):
    """Passes if the newest record is not older than this.

    Without a declared timestamp, the version's age counts.
    """

    max_age: Duration | None = None


class DriftCheck(CheckPolicy):
    """Fails if a population stability index exceeds the threshold significantly.

    The statistical test must have a p-value below `significance`.
    """

    threshold: float = Field(0.2, gt=0)
    significance: float = Field(0.01, gt=0, lt=1)


class BiasCheck(CheckPolicy):
    """Fails if a slice is too small, or its labels differ too much.

    The limits are `min_share` and `threshold`. The difference is the total variation distance: the share of labels that
    would have to change.
    """

    threshold: float = Field(0.3, gt=0, le=1)
    min_share: float = Field(0.0, ge=0, lt=1)


class Checks(FrozenModel):
    """The section `checks:` of a dataset definition."""

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
