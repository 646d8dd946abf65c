"""Parameters of every program except train, as types."""

from typing import Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from recipes.contracts.frozen_model import FrozenModel
from recipes.contracts.recipe import Recipe

# The languages that fastText's lid.176 tells apart, by their ISO 639 codes (specification row C2).
#
# Known without the model, so that a code that is none of them is refused when it is asked for, and not when all was read.

LANGUAGE_CODE_TEXT = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de
    diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie
    ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr
    mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah
    sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu
    xal xmf yi yo yue zh
"""
LANGUAGE_CODES = frozenset(LANGUAGE_CODE_TEXT.split())


# What each program is told, but train: the types of `Job.parameters`. Train's are in `recipes.training.run_setup`.


class SplitParameters(FrozenModel):
    """Split a dataset version by chance, or as one of its columns says."""

    seed: int = 42
    validation: float = Field(0.1, gt=0, lt=1)
    test: float = Field(0.1, gt=0, lt=1)
    group_by: str | None = Field(None, description="column whose values are spread over the splits, null as one of them")
    # Left out where it is not set: splits that were made before there was this key keep their place and their digest.
    column: str | None = Field(
        None, exclude_if=lambda value: value is None, description="column that names each record's split"
    )

    @model_validator(mode="after")
    def require_training_share(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError("validation and test together must be less than 1: the rest is trained on")
        return self


class TokenizeParameters(FrozenModel):
    """Records -> tokens (specification row C1)."""

    tokenizer: str = Field(description="id on the Hugging Face hub, file:///FOLDER, or recipe:NAME for its base model's")
    max_length: int = Field(8192, ge=8, description="longer records are cut at their end")
    padding: bool = Field(False, description="pad every record to max_length; packing needs none")
    output_format: Literal["arrow"] = "arrow"
    system_prompt: str | None = Field(None, description="put before questions that come without one")
    template_arguments: dict[str, JsonValue] = Field({}, description="variables of the chat template")


class NearDuplicates(FrozenModel):
    """When two records count as nearly the same: by the estimated Jaccard similarity of their runs of three words."""

    threshold: float = Field(0.8, gt=0, le=1)
    permutations: int = Field(128, ge=16, le=1024)
    seed: int = Field(42, ge=0, lt=2**64)  # as rensa takes it


class Toxicity(FrozenModel):
    """What a record may not say: whole words, and whatever an installed detector says of the text.

    A detector is a Python function text -> score from 0 to 1, installed under the entry point group
    `hanzo_ml.toxicity`: a job can name one, but not bring code of its own.
    """

    words: tuple[str, ...] = ()
    detector: str | None = None
    threshold: float = Field(0.5, ge=0, le=1, description="the score at which a record is rejected")

    @field_validator("words")
    @classmethod
    def refuse_empty_words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(word.strip() for word in value):
            raise ValueError("an empty word stands in every text: leave it out")
        return value


def is_missing(value: object) -> bool:
    """Whether a column has no value: none at all, null, or a text of spaces, as an empty cell of a table may become."""
    return value is None or (isinstance(value, str) and not value.strip())


class Bounds(FrozenModel):
    """The numbers that a column may have; both ends are among them."""

    min: float | None = Field(None, allow_inf_nan=False)
    max: float | None = Field(None, allow_inf_nan=False)

    @model_validator(mode="after")
    def require_possible_bounds(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("give min, max, or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"no number is at least {self.min:g} and at most {self.max:g}: exchange min and max")
        return self


class CleanParameters(FrozenModel):
    """What is done about missing values and outliers, by column, before all else (specification row C6)."""

    required: tuple[str, ...] = Field((), description="columns without a value in which a record is rejected")
    fill: dict[str, JsonValue] = Field({}, description="values for the records that have none in a column")
    within: dict[str, Bounds] = Field({}, description="numbers that a column may have; a record with another is rejected")

    @model_validator(mode="after")
    def refuse_filled_and_required(self) -> Self:
        if both := sorted(set(self.required) & set(self.fill)):
            raise ValueError(f"'{both[0]}' is required and filled: a record without it is rejected or filled, not both")
        if nothing := [column for column, value in self.fill.items() if is_missing(value)]:
            raise ValueError(f"the value of '{nothing[0]}' is none itself: give one, or leave the column out")
        return self

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(setting, column) of each column that is named."""
        named = {"required": self.required, "fill": self.fill, "within": self.within}
        return [(f"clean.{setting}", column) for setting, columns in named.items() for column in columns]


class ColumnFeature(FrozenModel):
    """What a column becomes: its category as numbers, or its number on another scale."""

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
    """Columns -> numbers that a model and whoever asks it compute alike (specification rows C5, C6).

    Categories and scales are those of the training records, aggregates are over all records of one key.
    """

    key: str | None = Field(None, description="column that says whom a record is about: what features are asked for by")
    columns: dict[str, ColumnFeature] = {}
    aggregate: dict[str, tuple[Literal["count", "sum", "mean", "std", "min", "max"], ...]] = {}

    @model_validator(mode="after")
    def require_features(self) -> Self:
        if not self.columns and not any(self.aggregate.values()):
            raise ValueError("nothing is computed: give columns, aggregate or both")
        if self.aggregate and self.key is None:
            raise ValueError("aggregate needs key: the column whose equal values are aggregated over")
        if clashing := self.columns.keys() & set(self.aggregates):
            raise ValueError(f"the column '{min(clashing)}' has the name of an aggregate: rename it")
        return self

    @property
    def aggregates(self) -> dict[str, tuple[str, str]]:
        """Name of a feature -> the column and the function that it is."""
        return {f"{column}.{function}": (column, function) for column, all in self.aggregate.items() for function in all}

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        """(setting, column) of each column that is named."""
        key = [("features.key", self.key)] if self.key is not None else []
        return [
            *key,
            *(("features.columns", column) for column in self.columns),
            *(("features.aggregate", column) for column in self.aggregate),
        ]


class FilterParameters(FrozenModel):
    """Which records stay (specification rows C2 and D1). Lengths are in tokens, before a record is cut."""

    min_length: int | None = Field(None, ge=1)
    max_length: int | None = Field(None, ge=1)
    dedup: bool = Field(True, description="of records that say the same, the first stays")
    near_dedup: NearDuplicates | None = None
    language: str | tuple[str, ...] | None = Field(None, description="ISO 639 codes as fastText's lid.176 gives them")
    language_confidence: float = Field(0.5, ge=0, le=1, description="below it a language counts as unclear")
    toxicity: Toxicity | None = None

    @field_validator("language")
    @classmethod
    def require_known_languages(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for code in (value,) if isinstance(value, str) else value or ():
            if code not in LANGUAGE_CODES:
                raise ValueError(
                    f"'{code}' is none of the languages that are told apart: write en, de, fr, zh, ... (ISO 639)"
                )
        return value

    @field_validator("max_length")
    @classmethod
    def require_possible_lengths(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_length")
        if value is not None and least is not None and value < least:
            raise ValueError(f"it is less than min_length, which is {least}: no record could stay")
        return value

    @property
    def languages(self) -> tuple[str, ...]:
        return (self.language,) if isinstance(self.language, str) else self.language or ()


class AugmentParameters(FrozenModel):
    """What happens to the records that stay (specification row C3)."""

    shuffle_seed: int | None = Field(42, description="the order's seed; null keeps the order of the input")
    oversample_minority: bool = Field(False, description="repeat training records until all classes are equally many")
    class_column: str = "class"
    mask_pii: bool = Field(True, description="replace personal data and secrets by [REDACTED]")


class PrepareParameters(FrozenModel):
    """Make a version of another: clean, filter, mask, tokenize, split, compute features, shuffle (rows C1-C6)."""

    # Left out where it is not set: what was prepared before there was this key keeps its place and its digest.
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
            raise ValueError("min_length and max_length count tokens: say which by tokenize.tokenizer")
        return value


class EvaluateParameters(FrozenModel):
    """Score the base, the tuned and the last accepted model on the same held-out records."""

    recipe: Recipe
    max_new_tokens: int = Field(24, ge=1)
    samples: int | None = Field(None, ge=1, description="generate answers for the first N test records; all when unset")
    questions: tuple[str, ...] = Field((), description="asked too and reported, not scored")


class ConvertParameters(FrozenModel):
    """Merge an adapter into its base, or take trained weights, and export."""

    recipe: Recipe
    quantization: Literal["F16", "BF16", "Q8_0"] = "Q8_0"
    template_arguments: dict[str, JsonValue] = Field({}, description="variables that training gave the chat template")
    form: Literal[1, 2] = Field(1, description="2 where this release exports otherwise than the ones before it")
