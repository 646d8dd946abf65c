"""Encode texts word by word, with a cache of known pieces."""

import re
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from recipes.preparation.tokenization.pre_tokenizer_patterns import find_split_pattern, is_ambiguous, read_component_steps

MAX_CACHED_TEXTS = 1 << 17
"""Pieces that are remembered, and words, in about 200 bytes each. When there are more, new ones begin to be collected beside
them; when those are as many, the ones of before are forgotten that did not come again."""
MAX_CACHED_CHARACTERS = 48
"""Characters of what is remembered: anything longer hardly comes again."""

TOKEN_ID_BYTES = 4
"""Of a token id."""

UNCHANGED_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
SUBSTITUTE_LETTERS = iter(range(0x100, 0x200))
BYTE_LETTERS = tuple(chr(byte if byte in UNCHANGED_BYTES else next(SUBSTITUTE_LETTERS)) for byte in range(256))
"""What stands for each byte in the vocabulary of a byte-level model, since GPT-2."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit numbers."""
    return array("i", ids).tobytes()


class AmbiguousCharacter(Exception):
    """A text holds a character that libraries may know differently."""


class IrregularWhitespace(Exception):
    """A text has white space before a space."""


class TokenCache(dict[str, bytes]):
    """The ids of texts, found where they are not known yet."""

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
    """Pieces, as the tokenizer's model has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def find(self, text: str) -> bytes:
        if len(text) == 1 and is_ambiguous(text):
            raise AmbiguousCharacter
        letters = "".join([BYTE_LETTERS[byte] for byte in text.encode()])
        return pack_ids([token.id for token in self._model.tokenize(letters)])


class WordCache(TokenCache):
    """Words, without what stands before each of them: a space, or nothing at the beginning of a text."""

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
    """Encodes texts, without the special tokens that a tokenizer puts around them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizes_nfc = bool(read_component_steps(tokenizer.normalizer))
        added = tokenizer.get_added_tokens_decoder().values()
        # The longest first, as the tokenizer looks for them.
        contents = sorted((token.content for token in added), key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, contents)) or '(?!)'})")
        # Where a text does not even hold what all of them begin with, it need not be looked through for them.
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
        """Take what stands between added tokens here, such as a system prompt, for one piece: many texts will have it."""
        parts = [part for part in self._added_pattern.split(text) if len(part) > 1]
        self._constant.update(zip(parts, self._encode_whole(parts), strict=True))

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, packed."""
        if self._pattern is None:
            return self._encode_whole(texts)
        found = [self._encode(text) for text in texts]
        left = [number for number, ids in enumerate(found) if ids is None]
        for number, ids in zip(left, self._encode_whole([texts[number] for number in left]), strict=True):
            found[number] = ids
        return found  # type: ignore[return-value]  # every place was filled above

    def splits_cleanly_at(self, text: str, place: int) -> bool:
        """Whether the text becomes the same ids as its two parts, up to `place` and from there on."""
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
        """Whether the tokenizer takes a text as it stands."""
        return not self._normalizes_nfc or text.isascii() or unicodedata.is_normalized("NFC", text)

    def _split_pieces(self, text: str) -> list[str]:
        """The pieces of a text, added tokens among them."""
        assert self._pattern is not None
        pieces: list[str] = []
        for number, part in enumerate(self._added_pattern.split(text)):
            pieces += [part] if number % 2 else self._pattern.findall(part)
        return pieces

    def _encode(self, text: str) -> bytes | None:
        """The ids of a text; None where the tokenizer must be asked."""
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
        """The ids of a text that holds no added token."""
        assert self._pattern is not None
        first, *others = text.split(" ")
        try:
            return self._first_words[first] + b"".join(map(self._other_words.__getitem__, others))
        except IrregularWhitespace:
            return b"".join([self._pieces[piece] for piece in self._pattern.findall(text)])

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        return [pack_ids(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
