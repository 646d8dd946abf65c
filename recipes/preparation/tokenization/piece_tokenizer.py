"""Encode texts word by word with a cache of pieces."""

import re
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from recipes.preparation.tokenization.pre_tokenizer_patterns import find_split_pattern, is_ambiguous, read_component_steps

MAX_CACHED_TEXTS = 1 << 17
"""Maximum cached pieces, and words, of about 200 bytes each. A full cache becomes the previous generation, from which
entries are reused; the generation before is dropped."""
MAX_CACHED_CHARACTERS = 48
"""Maximum characters of a cached text: longer ones rarely recur."""

TOKEN_ID_BYTES = 4
"""Size of a token id."""

UNCHANGED_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
SUBSTITUTE_LETTERS = iter(range(0x100, 0x200))
BYTE_LETTERS = tuple(chr(byte if byte in UNCHANGED_BYTES else next(SUBSTITUTE_LETTERS)) for byte in range(256))
"""The character for each byte in the vocabulary of a byte-level model, since GPT-2."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids as 32-bit numbers."""
    return array("i", ids).tobytes()


class AmbiguousCharacter(Exception):
    """A text contains a character that Unicode versions may classify differently."""


class IrregularWhitespace(Exception):
    """A text has whitespace before a space."""


class TokenCache(dict[str, bytes]):
    """A cache of texts' ids, computed on a miss."""

    def __init__(self) -> None:
        self.before: dict[str, bytes] = {}

    def __missing__(self, text: str) -> bytes:
        ids = self.before.get(text)
        if ids is None:
            ids = self.find(text)
        if len(text) <= MAX_CACHED_CHARACTERS:
            if len(self) >= MAX_CACHED_TEXTS:
                self.before = dict(self)
                self.clear()
            self[text] = ids
        return ids

    def find(self, text: str) -> bytes:
        raise NotImplementedError


class PieceCache(TokenCache):
    """Cache of pieces, encoded by the tokenizer's model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def find(self, text: str) -> bytes:
        if len(text) == 1 and is_ambiguous(text):
            raise AmbiguousCharacter
        letters = "".join([BYTE_LETTERS[byte] for byte in text.encode()])
        return pack_ids([token.id for token in self._model.tokenize(letters)])


class WordCache(TokenCache):
    """Cache of words without their prefix.

    A space, or nothing at the start of a text.
    """

    def __init__(self, space: str, pattern: re.Pattern[str], pieces: PieceCache) -> None:
        super().__init__()
        self._space = space
        self._pattern = pattern
        self._pieces = pieces

    def find(self, text: str) -> bytes:
        if (text or self._space)[-1:].isspace():
            raise IrregularWhitespace
        return b"".join([self._pieces[piece] for piece in self._pattern.findall(self._space + text)])


class PieceTokenizer:
    """Encodes texts without the special tokens that a tokenizer adds around them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizes_nfc = bool(read_component_steps(tokenizer.normalizer))
        added = tokenizer.get_added_tokens_decoder().values()
        # Longest first, the tokenizer's search order.
        contents = sorted((token.content for token in added), key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, contents)) or '(?!)'})")
        # A text without the first letter of all added tokens need not be searched for them.
        first = min(contents, default="")[:1]
        self._first_letter = first if all(content.startswith(first) for content in contents) else ""
        self._has_spaces = any(" " in content for content in contents)
        self._constant = dict(zip(contents, self._encode_whole(contents), strict=True))
        self._pattern = find_split_pattern(tokenizer)
        if self._pattern is not None:
            self._pieces = PieceCache(tokenizer.model)
            self._first_words = WordCache("", self._pattern, self._pieces)
            self._other_words = WordCache(" ", self._pattern, self._pieces)

    def add_constant(self, text: str) -> None:
        """Cache the parts of `text` between added tokens as single pieces.

        Used for texts of many records, such as a system prompt.
        """
        parts = [part for part in self._added_pattern.split(text) if len(part) > 1]
        self._constant.update(zip(parts, self._encode_whole(parts), strict=True))

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each text."""
        if self._pattern is None:
            return self._encode_whole(texts)
        found = [self._encode(text) for text in texts]
        left = [number for number, ids in enumerate(found) if ids is None]
        for number, ids in zip(left, self._encode_whole([texts[number] for number in left]), strict=True):
            found[number] = ids
        return found  # type: ignore[return-value]  # all elements are filled above

    def splits_cleanly_at(self, text: str, place: int) -> bool:
        """Return whether a text's two parts, split at `place`, encode like the whole."""
        if self._pattern is None or self._has_spaces:
            return False
        start, end = max(text.rfind(" ", 0, place), 0), text.find(" ", place)
        end = len(text) if end < 0 else end
        if (start and text[start - 1].isspace()) or (end < len(text) and text[end - 1].isspace()):
            return False
        around, before, behind = text[start:end], text[start:place], text[place:end]
        surroundings = text[max(start - 1, 0) : end]
        if not surroundings.isascii() and (not self._is_composed(around) or any(map(is_ambiguous, surroundings))):
            return False
        return self._split_pieces(around) == self._split_pieces(before) + self._split_pieces(behind)

    def _is_composed(self, text: str) -> bool:
        """Return whether the tokenizer's normalizer leaves a text unchanged."""
        return not self._normalizes_nfc or text.isascii() or unicodedata.is_normalized("NFC", text)

    def _split_pieces(self, text: str) -> list[str]:
        """Split a text into pieces and added tokens."""
        assert self._pattern is not None
        pieces: list[str] = []
        for number, part in enumerate(self._added_pattern.split(text)):
            pieces += [part] if number % 2 else self._pattern.findall(part)
        return pieces

    def _encode(self, text: str) -> bytes | None:
        """Return the ids of a text, or None if the tokenizer itself must encode it."""
        if not self._is_composed(text):
            return None
        try:
            if self._first_letter not in text:
                return self._encode_plain(text)
            constant = self._constant
            return b"".join([constant.get(part) or self._encode_plain(part) for part in self._added_pattern.split(text)])
        except AmbiguousCharacter:
            return None

    def _encode_plain(self, text: str) -> bytes:
        """Return the ids of a text without added tokens."""
        assert self._pattern is not None
        first, *others = text.split(" ")
        try:
            return self._first_words[first] + b"".join(map(self._other_words.__getitem__, others))
        except IrregularWhitespace:
            return b"".join([self._pieces[piece] for piece in self._pattern.findall(text)])

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        return [pack_ids(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
