"""Filter toxic texts by a word list or an installed detector."""

import re
from collections.abc import Callable
from importlib.metadata import entry_points

from recipes.contracts.job import BadConfiguration
from recipes.contracts.parameters import Toxicity

TOXICITY_GROUP = "hanzo_ml.toxicity"

Detector = Callable[[str], float]


class ToxicityFilter:
    """Says of a text why it is rejected. Raises BadConfiguration where the detector is not installed."""

    def __init__(self, parameters: Toxicity) -> None:
        words = "|".join(re.escape(word) for word in sorted(parameters.words, key=len, reverse=True))
        # Not \b, which a listed word that ends in no letter, such as one with stars in it, is never followed by.
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
    """An installed detector by its name."""
    found = entry_points(group=TOXICITY_GROUP)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none is installed"
        raise BadConfiguration(f"filter.toxicity.detector: unknown detector '{name}' ({known})")
    loaded: Detector = found[name].load()
    return loaded
