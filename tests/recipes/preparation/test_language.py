"""Language detection: supported languages, and refusal of others."""

import pytest
from pydantic import ValidationError

from recipes.contracts.parameters import LANGUAGE_CODES, FilterParameters
from recipes.preparation.text_filters import load_model


def test_language_codes_equal_those_of_the_detection_model() -> None:
    labels, _ = load_model().predict("hello", k=1000, threshold=-1.0)
    assert {label.removeprefix("__label__") for label in labels} == LANGUAGE_CODES


@pytest.mark.parametrize("language", ["xx", "english", ("en", "EN"), ""])
def test_unsupported_language_code_is_refused(language: str | tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="is not a language that can be detected: use"):
        FilterParameters(language=language)
    assert FilterParameters(language=("en", "de")).languages == ("en", "de")
