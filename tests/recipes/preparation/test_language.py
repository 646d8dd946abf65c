"""Which languages are told apart, and that no other is asked for."""

import pytest
from pydantic import ValidationError

from recipes.contracts.parameters import LANGUAGE_CODES, FilterParameters
from recipes.preparation.text_filters import load_model


def test_the_known_codes_are_those_of_the_model() -> None:
    labels, _ = load_model().predict("hello", k=1000, threshold=-1.0)
    assert {label.removeprefix("__label__") for label in labels} == LANGUAGE_CODES


@pytest.mark.parametrize("language", ["xx", "english", ("en", "EN"), ""])
def test_another_code_would_reject_every_record_and_is_refused(language: str | tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="is not a language that can be detected: use"):
        FilterParameters(language=language)
    assert FilterParameters(language=("en", "de")).languages == ("en", "de")
