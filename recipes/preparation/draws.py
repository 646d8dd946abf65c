"""By what a record comes to its split: a number that is drawn for its question, before anything in that was masked.

Of the masked question it would be another number than the version has that this one is prepared of, and what that held out
this would train on. Questions that are one since they were masked are joined by `recipes.preparation.joining`.
"""

import pyarrow as pa
import pyarrow.compute as pc

from recipes.preparation.split_assignment import draw
from recipes.records.record_reader import normalize

NOT_A_WORD = r"[^A-Za-z0-9_]+"


def draws(questions: list[str], seed: int) -> list[int]:
    """A number for each question, the same whatever its capitals and punctuation.

    In the order of `recipes.preparation.split_assignment.draw`: what a version holds out, a version that is prepared of it holds out too.
    """
    words = pc.replace_substring_regex(pc.ascii_lower(pa.array(questions, pa.large_string())), NOT_A_WORD, " ").to_pylist()
    # Of other letters every library has its own idea.
    normal = (word.strip() if asked.isascii() else normalize(asked) for asked, word in zip(questions, words, strict=True))
    return [draw(text, seed) for text in normal]
