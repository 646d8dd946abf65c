"""The word that was meant, where a person wrote another."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_key(path: str, known: Iterable[str]) -> str:
    """What to say of a key that nobody knows, such as `checkpoint.intervall`."""
    meant = meant_by(path.rpartition(".")[2], known)
    return f"unknown key '{path}': " + (f"did you mean '{meant}'?" if meant else "remove it or correct its spelling")


def meant_by(word: str, known: Iterable[str]) -> str | None:
    """The word of those that are known which a misspelled one is nearest to; none where all of them are others."""
    return next(iter(get_close_matches(word, sorted(known), n=1)), None)
