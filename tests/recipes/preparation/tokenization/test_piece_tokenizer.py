"""Cached tokenization by pieces equals the tokenizer's own for every text and tokenizer."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from recipes.preparation.tokenization import piece_tokenizer, pre_tokenizer_patterns
from recipes.preparation.tokenization.piece_tokenizer import PieceTokenizer, pack_ids
from recipes.preparation.tokenization.pre_tokenizer_patterns import (
    GPT2,
    GPT2_INDIVIDUAL_DIGITS,
    KNOWN_PATTERNS,
    find_split_pattern,
    is_ambiguous,
    translate_pattern,
)
from tests.recipes.tiny_model import SENTENCES, SPECIAL

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


CUTTERS = {pattern: split_by(pattern) for pattern in sorted(KNOWN_PATTERNS - {GPT2})}
CUTTERS[GPT2] = GPT2_BYTES
CUTTERS[GPT2_INDIVIDUAL_DIGITS] = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_BYTES])


def trained(cutter: Any, **token: Any) -> Tokenizer:
    """Train merges over spaces, line ends and punctuation, so that other cuts give other tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutter
    added = [AddedToken(content, **{"special": True, "normalized": False, **token}) for content in [*SPECIAL, "<|im_end|>>"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=added, initial_alphabet=alphabet, show_progress=False)
    layout = [
        "\n\n\n",
        "  \n  x",
        "    a\t\tb",
        "!!\n\n",
        "...//",
        "''s 'LL 12 1234",
        "\u00e9\u00e9\u00e9 \u0301\u0301",
        " \r\n ",
        "\U0001f600\U0001f600!",
    ]
    tokenizer.train_from_iterator([*SENTENCES, *(text * 3 for text in layout)] * 2, trainer)
    return tokenizer


TOKENIZERS = {pattern: trained(cutter) for pattern, cutter in CUTTERS.items()}
SCRAPS = [
    *(
        "keeper",
        "The",
        " lamp",
        "s",
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'\u017f",
        "don't",
        "1",
        "1947",
        "\u0661",
        "\u00b2",
        "\u00bd",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\x0b",
        "\x1c",
        "\x85",
        "\u00a0",
        "\u2003",
        "\u180e",
        "\u200b",
        "\u3000",
        "!",
        "...",
        "/",
        "-",
    ),
    *(
        "\u00e9",
        "e\u0301",
        "\u0301",
        "\u01c5",
        "\u02b0",
        "\u4e2d\u6587",
        "\u0e01\u0e33",
        "\U0001f600",
        "\U0001d400",
        "\u1e9e",
        "\u212a",
        "\ufffd",
    ),
    *(*SPECIAL, "<|im_end|>>", "<|im", "<", "|>"),
]
PROMPTS = ["<|im_start|>system\nBe  brief. \n<|im_end|>\n<|im_start|>user\n", "\U0001f600<|im_start|>s"]
TEXTS = st.lists(st.sampled_from([*SCRAPS, *PROMPTS]) | st.text(max_size=3), max_size=12).map("".join)


def whole(tokenizer: Tokenizer, texts: list[str]) -> list[bytes]:
    return [pack_ids(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.mark.parametrize("pattern", CUTTERS)
@pytest.mark.parametrize("composes", [False, True])
def test_cached_pieces_encode_like_the_whole_text(pattern: str, composes: bool) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[pattern].to_str())
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    assert find_split_pattern(tokenizer) is translate_pattern(pattern)
    remembering = PieceTokenizer(tokenizer)
    for prompt in PROMPTS:
        remembering.add_constant(prompt)

    @given(st.lists(TEXTS, max_size=4))
    @settings(max_examples=150, deadline=None)
    @example(["a\n b  c \t d ", " a", "  a", "a \n", "a\u00a0 5", "x<|im_end|> y \n<|im_end|>  "])
    @example(["a\n\nb", "a  5", "!\n\n/x", " \n \n x", "\U0001f600\U0001f600!", "!<|im_end|>>", "a\n\n<|im_end|>b", ""])
    def check(texts: list[str]) -> None:
        assert remembering.encode(texts) == whole(tokenizer, texts)
        assert remembering.encode(texts) == whole(tokenizer, texts), "remembered"

    check()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", CUTTERS)
def test_translated_pattern_splits_every_character_like_the_tokenizer(pattern: str) -> None:
    """All unambiguous characters, next to letters, digits, spaces and themselves."""
    known = [letter for letter in map(chr, range(0x10000)) if not is_ambiguous(letter)]
    assert len(known) > 50_000
    for start in range(0, len(known), 256):
        text = "".join(f"a{letter}b {letter}{letter}\n{letter}1{letter} " for letter in known[start : start + 256])
        cut = [text[begin:end] for _, (begin, end) in CUTTERS[pattern].pre_tokenize_str(text)]
        assert translate_pattern(pattern).findall(text) == cut


UNKNOWN = {
    "another pattern": trained(split_by(r"\w+|\W+")),
    "a space before the text": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "spaces that are a token's": trained(GPT2_BYTES, lstrip=True, rstrip=True),
    "spaces that are marked": trained(pre_tokenizers.Metaspace()),
    "digits in threes": trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(), GPT2_BYTES])),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_tokenizer_with_unknown_split_pattern_encodes_whole_texts(why: str) -> None:
    tokenizer = UNKNOWN[why]
    texts = ["the keeper  counts 123 \n ships", " <|im_end|> and", "", "don't"]
    assert find_split_pattern(tokenizer) is None
    assert PieceTokenizer(tokenizer).encode(texts) == whole(tokenizer, texts)


def test_tokenizer_with_text_changing_normalizer_encodes_whole_texts() -> None:
    tokenizer = trained(GPT2_BYTES)
    tokenizer.normalizer = normalizers.Lowercase()
    assert find_split_pattern(tokenizer) is None
    assert PieceTokenizer(tokenizer).encode(["The KEEPER"]) == whole(tokenizer, ["the keeper"])


def test_tokenizer_with_bpe_dropout_is_not_cached() -> None:
    tokenizer = trained(GPT2_BYTES)
    tokenizer.model.dropout = 0.5
    assert find_split_pattern(tokenizer) is None


def test_piece_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long words are not cached, and older entries are evicted."""
    monkeypatch.setattr(piece_tokenizer, "MAX_CACHED_TEXTS", 300)
    tokenizer = TOKENIZERS[GPT2]
    remembering = PieceTokenizer(tokenizer)
    for start in range(0, 3000, 100):
        texts = [f"the keeper counts {number} ships, and so does she " + "x" * 100 for number in range(start, start + 100)]
        assert remembering.encode(texts) == whole(tokenizer, texts)
        for known in (
            remembering._pieces,
            remembering._pieces.before,
            remembering._other_words,
            remembering._other_words.before,
        ):
            assert len(known) <= 300
            assert max(map(len, known), default=0) <= piece_tokenizer.MAX_CACHED_CHARACTERS


@pytest.mark.parametrize("pattern", CUTTERS)
def test_text_is_split_only_where_parts_encode_like_the_whole(pattern: str) -> None:
    tokenizer = TOKENIZERS[pattern]
    remembering = PieceTokenizer(tokenizer)
    parted = []

    @given(TEXTS, TEXTS)
    @settings(max_examples=300, deadline=None)
    @example("a\n", "b c")
    @example("a <|im_end|>", "\n")
    def check(before: str, behind: str) -> None:
        if remembering.splits_cleanly_at(before + behind, len(before)):
            parted.append(before)
            assert b"".join(whole(tokenizer, [before, behind])) == whole(tokenizer, [before + behind])[0]

    check()
    assert parted


def test_character_class_is_expanded_to_code_ranges() -> None:
    assert pre_tokenizer_patterns.format_code_ranges(
        pre_tokenizer_patterns.find_class_members(r"[^\s\p{L}\p{N}]")
    ).startswith(r"\u0000-\u0008\u000e-\u001f\u0021-\u002f\u003a-\u0040")
