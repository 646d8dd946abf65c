"""Parameters of every program except train."""

from typing import Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.recipe import Recipe

# ISO 639 codes of the languages in fastText's lid.176.
#
# Listed here, so that an unknown code is rejected without the model, when it is requested rather than after all data was
# read.

LANGUAGE_CODE_TEXT = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de
    diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie
    ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr
    mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah
    sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu
    xal xmf yi yo yue zh
"""
LANGUAGE_CODES = frozenset(LANGUAGE_CODE_TEXT.split())


# Types of `Job.parameters` for each program. Those of train are in `recipes.training.run_setup`.


class SplitParameters(FrozenModel):
    """Split a dataset version randomly, or by one of its columns."""

    seed: int = 42
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)
    group_by: str | None = Field(None, description="column whose equal values (null is one) must be in the same split")
    # Omitted if unset, so that location and digest of splits from before this key stay the same.
    column: str | None = Field(
        None, exclude_if=lambda value: value is None, description="column that names each record's split"
    )

    @model_validator(mode="after")
    def require_training_share(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError("validation and test together must be less than 1: the rest is used for training")
        return self


class TokenizeParameters(FrozenModel):
    """How records become tokens."""

    tokenizer: str = Field(description="id on the Hugging Face hub, file:///FOLDER, or recipe:NAME for its base model's")
    max_length: int = Field(8192, ge=8, description="longer records are truncated")
    padding: bool = Field(False, description="pad every record to max_length; packing needs none")
    output_format: Literal["arrow"] = "arrow"
    system_prompt: str | None = Field(None, description="added to conversations without one")
    template_arguments: dict[str, JsonValue] = Field({}, description="variables of the chat template")


class NearDuplicates(FrozenModel):
    """When records are near duplicates: by estimated Jaccard similarity of their word trigrams."""

    threshold: float = Field(0.8, gt=0, le=1)
    permutations: int = Field(128, ge=16, le=1024)
    seed: int = Field(42, ge=0, lt=2**64)  # the range of rensa


class Toxicity(FrozenModel):
    """Reject toxic records: by whole words, and by the score of an installed detector.

    A detector is a Python function from text to a score between 0 and 1, installed under the entry point group
    `hanzo_ml.toxicity`: a job can select one by name, but cannot supply code.
    """

    words: tuple[str, ...] = ()
    detector: str | None = None
    threshold: float = Field(0.5, ge=0, le=1, description="minimum score of rejected records")

    @field_validator("words")
    @classmethod
    def refuse_empty_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(word.strip() for word in value):
            raise ValueError("an empty word is in every text: remove it")
        return value


def is_missing(value: object) -> bool:
    """Return whether a column's value is missing.

    Absent, null, or blank as an empty table cell may be.
    """
    return value is None or (isinstance(value, str) and not value.strip())


class Bounds(FrozenModel):
    """The range of a column's values, inclusive."""

    min: float | None = Field(None, allow_inf_nan=False)
    max: float | None = Field(None, allow_inf_nan=False)

    @model_validator(mode="after")
    def require_possible_bounds(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("set min, max, or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"no number is at least {self.min:g} and at most {self.max:g}: swap min and max")
        return self


class CleanParameters(FrozenModel):
    """Treatment of missing values and outliers by column; the first stage of a preparation."""

    required: tuple[str, ...] = Field((), description="columns whose missing value rejects a record")
    fill: dict[str, JsonValue] = Field({}, description="replacements for missing values, by column")
    within: dict[str, Bounds] = Field({}, description="allowed range of numbers by column; other records are rejected")

    @model_validator(mode="after")
    def refuse_filled_and_required(self) -> Self:
        if both := sorted(set(self.required) & set(self.fill)):
            raise ValueError(f"'{both[0]}' is required and filled: records without it can be rejected or filled, not both")
        if nothing := [column for column, value in self.fill.items() if is_missing(value)]:
            raise ValueError(f"the value of '{nothing[0]}' is itself missing: set one, or remove the column")
        return self

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Pairs of setting and column, for every column in the settings."""
        named = {"required": self.required, "fill": self.fill, "within": self.within}
        return [(f"clean.{setting}", column) for setting, columns in named.items() for column in columns]


class ColumnFeature(FrozenModel):
    """Transformation of a column: encode its categories as numbers, or scale its numbers."""

    encode: Literal["one_hot", "ordinal"] | None = None
    normalize: Literal["standard", "min_max"] | None = None

    @model_validator(mode="after")
    def require_one_operation(self) -> Self:
        if (self.encode is None) == (self.normalize is None):
            raise ValueError(
                "write encode: one_hot or ordinal for a category, or normalize: standard or min_max for a number"
            )
        return self


class FeatureParameters(FrozenModel):
    """Numeric features of columns, computed alike in training and serving.

    Categories and scales are taken from training records; aggregates cover all records with the same key.
    """

    key: str | None = Field(None, description="column with the entity of a record, by which features are looked up")
    columns: dict[str, ColumnFeature] = {}
    aggregate: dict[str, tuple[Literal["count", "sum", "mean", "std", "min", "max"], ...]] = {}

    @model_validator(mode="after")
    def require_features(self) -> Self:
        if not self.columns and not any(self.aggregate.values()):
            raise ValueError("there are no features: set columns, aggregate or both")
        if self.aggregate and self.key is None:
            raise ValueError("aggregate needs key: the column whose equal values are aggregated over")
        if clashing := self.columns.keys() & set(self.aggregates):
            raise ValueError(f"the column '{min(clashing)}' has the same name as an aggregate: rename it")
        return self

    @property
    def aggregates(self) -> dict[str, tuple[str, str]]:
        """Column and function of each aggregate, by the feature's name."""
        return {f"{column}.{function}": (column, function) for column, all in self.aggregate.items() for function in all}

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """Pairs of setting and column, for every column in the settings."""
        key = [("features.key", self.key)] if self.key is not None else []
        return [
            *key,
            *(("features.columns", column) for column in self.columns),
            *(("features.aggregate", column) for column in self.aggregate),
        ]


class FilterParameters(FrozenModel):
    """Which records are kept.

    Lengths are in tokens, before truncation.
    """

    min_length: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    dedup: bool = Field(True, description="keep only the first of equal records")
    near_dedup: NearDuplicates | None = None
    language: str | tuple[str, ...] | None = Field(None, description="ISO 639 codes of fastText's lid.176")
    language_confidence: float = Field(0.5, ge=0, le=1, description="below it a language counts as unclear")
    toxicity: Toxicity | None = None

    @field_validator("language")
    @classmethod
    def require_known_languages(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for code in (value,) if isinstance(value, str) else value or ():
            if code not in LANGUAGE_CODES:
                raise ValueError(
                    f"'{code}' is not a language that can be detected: use an ISO 639 code such as en, de, fr or zh"
                )
        return value

    @field_validator("max_length")
    @classmethod
    def require_possible_lengths(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_length")
        if value is not None and least is not None and value < least:
            raise ValueError(f"it is less than min_length, which is {least}: no record could be kept")
        return value

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,) if isinstance(self.language, str) else self.language or ()


class AugmentParameters(FrozenModel):
    """Changes to the records that are kept."""

    shuffle_seed: int | None = Field(42, description="seed of the random order; null keeps the input's order")
    oversample_minority: bool = Field(False, description="repeat training records until all classes have the same size")
    class_column: str = "class"
    mask_pii: bool = Field(True, description="replace personal data and secrets by [REDACTED]")


class PrepareParameters(FrozenModel):
    """Derive a version from another: clean, filter, mask, tokenize, split, compute features, shuffle."""

    # Omitted if unset, so that location and digest of preparations from before these keys stay the same.
    clean: CleanParameters | None = Field(None, exclude_if=lambda value: value is None)
    features: FeatureParameters | None = Field(None, exclude_if=lambda value: value is None)
    tokenize: TokenizeParameters | None = None
    filter: FilterParameters = FilterParameters()
    augment: AugmentParameters = AugmentParameters()
    split: SplitParameters = SplitParameters()

    @field_validator("filter")
    @classmethod
    def require_tokenizer_for_lengths(cls, value: FilterParameters, info: ValidationInfo) -> FilterParameters:
        if info.data.get("tokenize") is None and (value.min_length or value.max_length):
            raise ValueError("min_length and max_length count tokens: set tokenize.tokenizer")
        return value


class EvaluateParameters(FrozenModel):
    """Score the base, the tuned and the last accepted model on the same held-out records."""

    recipe: Recipe
    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1, description="number of test records to generate answers for; all when unset")
    questions: tuple[str, ...] = Field((), description="additional prompts whose answers are reported, not scored")


class ConvertParameters(FrozenModel):
    """Merge an adapter into its base, or take trained weights, and export them."""

    recipe: Recipe
    quantization: Literal["F16", "BF16", "Q8_0"] = "Q8_0"
    template_arguments: dict[str, JsonValue] = Field({}, description="variables of the chat template in training")
    form: Literal[1, 2] = Field(1, description="version of the export format; 2 if it differs from earlier releases")
