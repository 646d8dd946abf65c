"""A tokenizer as the workers read it: the file of the fast implementation, and beside it what else decides."""

from pathlib import Path

from pydantic import JsonValue

from recipes.contracts.frozen_model import Frozen

FROZEN = "frozen.json"
TOKENIZER = "tokenizer.json"


class FrozenTokenizer(Frozen):
    """Chat template or several by name, special tokens by name, the ids of two, and a hash that is equal where all of it is.

    `around` are the texts that the template puts around a plain question: workers need not load it for them.
    """

    template: str | dict[str, str] | None
    around: tuple[str, str] | None
    special: dict[str, JsonValue]
    eos: int
    padding: int
    fingerprint: str


def read_frozen(folder: Path) -> FrozenTokenizer:
    return FrozenTokenizer.model_validate_json((folder / FROZEN).read_bytes())
