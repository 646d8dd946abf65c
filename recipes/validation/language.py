"""In which languages the texts of a dataset are."""

from collections import Counter
from collections.abc import Sequence

CHARACTERS = 300
CERTAIN = 0.5


def languages(texts: Sequence[str]) -> dict[str, int]:
    """ISO 639 code -> number of texts; `unclear` where the model is less than half sure. The beginning of a text decides."""
    # Its model is read from disk, and not every dataset is asked for its languages.
    from recipes.preparation.language import guess, open_model

    model = open_model()
    found: Counter[str] = Counter()
    for text in texts:
        language, certainty = guess(model, text, CHARACTERS)
        found[language if certainty >= CERTAIN else "unclear"] += 1
    return dict(found.most_common())
