"""What the programs `validate` and `find_leaks` are told."""

from pydantic import Field

from recipes.contracts.frozen_model import Frozen
from recipes.contracts.parameters import NearDuplicates
from recipes.validation.contract import Contract


class Slices(Frozen):
    """By which columns a dataset is looked at for bias, and whose balance within each slice matters."""

    columns: tuple[str, ...] = ()
    label: str | None = Field(None, description="column that holds what a model would learn to answer")


class Measures(Frozen):
    """What is measured beside what always is."""

    timestamp: str | None = Field(None, description="column that says when a record was made: ISO 8601, or Unix seconds")
    slices: Slices = Slices()
    near_duplicates: NearDuplicates | None = NearDuplicates()
    languages: bool = True
    sample: int = Field(5000, ge=100, description="records, about, by which distributions are described and compared")


class ValidateParameters(Frozen):
    """Check a version's records against a contract, and describe them."""

    contract: Contract = Contract()
    measures: Measures = Measures()
    reference: str = Field("", description="what the input `reference` is called, as NAME@VERSION")


class FindLeaksParameters(Frozen):
    """Look for a test split's records in what was trained on. `names` maps an input's role to what people call it."""

    near: NearDuplicates = NearDuplicates()
    names: dict[str, str] = {}
