"""By what a record comes to its split: a number that is drawn for its question, before anything in that was masked.

Of the masked question it would be another number than the version has that this one is prepared of, and what that held out
this would train on. But two questions that differ in what was masked alone are one question then: they must stay together.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recipes.assignment import draw
from recipes.records import normalize

NOT_A_WORD = r"[^A-Za-z0-9_]+"


def draws(questions: list[str], seed: int) -> list[int]:
    """A number for each question, the same whatever its capitals and punctuation.

    In the order of `recipes.assignment.draw`: what a version holds out, a version that is prepared of it holds out too.
    """
    words = pc.replace_substring_regex(pc.ascii_lower(pa.array(questions, pa.large_string())), NOT_A_WORD, " ").to_pylist()
    # Of other letters every library has its own idea.
    normal = (word.strip() if asked.isascii() else normalize(asked) for asked, word in zip(questions, words, strict=True))
    return [draw(text, seed) for text in normal]


def together(draw: NDArray[np.uint64], masked: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The draw of each record, of the question as it was, made equal for those that ask the same since it was masked.

    They take the lowest, which is held out first, so that nothing that the version before held out is trained on.
    """
    if (draw == masked).all():
        return draw
    members = [np.unique(column, return_inverse=True)[1] for column in (draw, masked)]
    found = draw
    while True:
        before = found
        for member in members:
            lowest = np.full(member.max() + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
            np.minimum.at(lowest, member, found)
            found = lowest[member]
        if (found == before).all():
            return found
