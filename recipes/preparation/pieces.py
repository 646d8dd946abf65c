"""Texts -> token ids, a piece at a time: the ids that the tokenizer gives, for a fraction of its time.

A tokenizer cuts a text into pieces, about a word each, and makes tokens of each by itself. Most pieces of a text stood in
others before: here a text is cut by the same pattern, and a piece is given to the tokenizer once.
"""

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from tokenizers import Tokenizer

from recipes.preparation.patterns import is_strange, pattern_of, stages

MOST = 1 << 17
"""Pieces that are remembered, in about 200 bytes each; when there are more, all are forgotten."""
LONGEST = 48
"""Characters of a piece that is remembered: a longer one hardly comes again."""
FEW = 6
"""Texts of which more than one in so many pieces is new are not made of words: of them only what comes twice is learned."""


BYTES = 4
"""Of a token id."""


def packed(ids: Iterable[int]) -> bytes:
    """Token ids as 32-bit numbers."""
    return array("i", ids).tobytes()


class PieceTokenizer:
    """Encodes texts, without the special tokens that a tokenizer puts around them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pattern = pattern_of(tokenizer)
        self._composes = bool(stages(tokenizer.normalizer))
        added = tokenizer.get_added_tokens_decoder().values()
        # The longest first, as the tokenizer looks for them.
        contents = sorted((token.content for token in added), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, contents)) or '(?!)'})")
        # Where a text does not even hold what all of them begin with, it need not be looked through for them.
        first = min(contents, default="")[:1]
        self._mark = first if all(content.startswith(first) for content in contents) else ""
        self._constant: dict[str, bytes] = {}
        self._known: dict[str, bytes] = {}

    def expect(self, text: str) -> None:
        """Take what stands between added tokens here, such as a system prompt, for one piece: many texts will have it."""
        parts = [part for part in self._added.split(text) if len(part) > 1]
        self._constant.update(zip(parts, self._whole(parts), strict=True))
        self._known.update(self._constant)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, packed."""
        if self._pattern is None:
            return self._whole(texts)
        found = [b""] * len(texts)
        # One text after the other: what was looked up is gone before the next is cut, and the processor's cache is enough.
        unfinished = self._look_up(((number, self._cut(text)) for number, text in enumerate(texts)), found)
        new = self._learn([pieces for _, pieces in unfinished]) if unfinished else []
        left = [number for number, _ in self._look_up(unfinished, found)]
        for number, ids in zip(left, self._whole([texts[number] for number in left]), strict=True):
            found[number] = ids
        for piece in new:
            if len(piece) > LONGEST:
                del self._known[piece]
        return found

    def _cut(self, text: str) -> list[str]:
        """The pieces of a text, added tokens among them. Of one that the tokenizer would change before, the text itself."""
        assert self._pattern is not None
        if self._composes and not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return [text]
        if self._mark not in text:
            return self._pattern.findall(text)
        pieces: list[str] = []
        for number, part in enumerate(self._added.split(text)):
            pieces += [part] if number % 2 or part in self._constant else self._pattern.findall(part)
        return pieces

    def _look_up(self, cut: Iterable[tuple[int, list[str]]], found: list[bytes]) -> list[tuple[int, list[str]]]:
        """Leave the ids of texts by their numbers; those of which a piece is not known come back."""
        known, unfinished = self._known.__getitem__, []
        for number, pieces in cut:
            try:
                found[number] = b"".join(map(known, pieces))
            except KeyError:
                unfinished.append((number, pieces))
        return unfinished

    def _learn(self, cut: Sequence[list[str]]) -> list[str]:
        """Give the tokenizer what is new in these texts, and remember it. Returns the new pieces."""
        if len(self._known) > MOST:
            self._known = dict(self._constant)
        new = [piece for piece in dict.fromkeys(chain.from_iterable(cut)) if piece not in self._known]
        if len(new) * FEW > sum(map(len, cut)):
            counts = Counter(chain.from_iterable(cut))
            new = [piece for piece in new if counts[piece] > 1]
        new = [piece for piece in new if len(piece) > 1 or not is_strange(piece)]
        self._known.update(zip(new, self._whole(new), strict=True))
        return new

    def _whole(self, texts: Sequence[str]) -> list[bytes]:
        return [packed(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
