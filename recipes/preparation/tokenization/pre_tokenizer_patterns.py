"""Split patterns of byte-level pre-tokenizers as Python regular expressions."""

import json
import re
import unicodedata
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

CONTRACTIONS, WHITESPACE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
QWEN3_5 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
)
KNOWN_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, QWEN3_5, O200K})
GPT2_INDIVIDUAL_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""GPT-2's pattern after a step that isolates digits: they take no preceding space, and a run of spaces ends at one."""

CHARACTER_CLASS = re.compile(r"\[\^?(?:\\p\{\w+\}|\\\w|[^\]\\])+\]|\\p\{\w+\}|\\[sS]")
CLASS_MEMBER = re.compile(r"\\p\{(\w+)\}|(\\s)|(.)", re.DOTALL)
CONTROL_WHITESPACE = "\t\n\v\f\r\x85"
"""Control characters that count as spaces."""
AMBIGUOUS_CASE_LETTERS = "\u017f\u212a"
"""Long s and the Kelvin sign: some libraries match them case-insensitively as s and k."""


def find_split_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return the pattern that splits a text into independently encoded pieces, if known.

    The text must be in Unicode NFC and contain no added token.
    """
    steps = read_component_steps(tokenizer.pre_tokenizer)
    normal = {step["type"] for step in read_component_steps(tokenizer.normalizer)}
    added = tokenizer.get_added_tokens_decoder().values()
    wide = any(token.lstrip or token.rstrip or token.single_word or (token.normalized and normal) for token in added)
    if not normal <= {"NFC"} or wide or len({token.normalized for token in added}) > 1:
        return None
    if getattr(tokenizer.model, "dropout", None) or not steps or steps[-1]["type"] != "ByteLevel":
        return None
    if steps[-1]["add_prefix_space"]:
        return None
    *before, last = steps
    found = GPT2 if last["use_regex"] else None
    for step in reversed(before):
        whole = (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True))
        if step["type"] == "Split" and whole and not found and step["pattern"].get("Regex") in KNOWN_PATTERNS:
            found = str(step["pattern"]["Regex"])
        elif step["type"] == "Digits" and step["individual_digits"] and found == GPT2:
            found = GPT2_INDIVIDUAL_DIGITS
        else:
            return None
    return translate_pattern(found) if found else None


def read_component_steps(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer component from its serialized state."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    found: list[dict[str, Any]] = state.get("pretokenizers") or state.get("normalizers") or [state]
    return found


@cache
def translate_pattern(pattern: str) -> re.Pattern[str]:
    """Translate a tokenizer's pattern to the syntax of `re`, with character classes written out."""
    plain = pattern.replace("(?i:", "(?ai:").replace(r"\r", "\r").replace(r"\n", "\n")
    spelled = CHARACTER_CLASS.sub(lambda found: f"[{format_code_ranges(find_class_members(found[0]))}]", plain)
    return re.compile(f"{spelled}|.", re.DOTALL)


def find_class_members(described: str) -> NDArray[np.bool_]:
    """Return the code points in a class: `\\p{L}`, `\\s`, `\\S`, `[...]` or `[^...]`."""
    inner = r"^\s" if described == r"\S" else described.removeprefix("[").removesuffix("]")
    found = np.zeros(len(unicode_categories()), np.bool_)
    for category, space, letter in CLASS_MEMBER.findall(inner.removeprefix("^")):
        found[[ord(each) for each in (CONTROL_WHITESPACE if space else letter)]] = True
        if not letter:
            found |= np.char.startswith(unicode_categories(), "Z" if space else category)
    return (unicode_categories() != "") & ~found if inner.startswith("^") else found


@cache
def unicode_categories() -> NDArray[np.str_]:
    """Return the category of each code point on which all libraries agree; empty for others."""
    then, now = unicodedata.ucd_3_2_0.category, unicodedata.category
    unlike = ("Cn", "Cs")  # unassigned, surrogate
    names = [(now(letter), then(letter), letter) for letter in map(chr, range(0x10000))]
    return np.array(
        [
            new if new == old and new not in unlike and letter not in AMBIGUOUS_CASE_LETTERS else ""
            for new, old, letter in names
        ]
    )


def is_ambiguous(letter: str) -> bool:
    """Return whether libraries may classify a character differently: pattern and tokenizer may then disagree."""
    return ord(letter) >= len(unicode_categories()) or not unicode_categories()[ord(letter)]


def format_code_ranges(chosen: NDArray[np.bool_]) -> str:
    """Format code points as the inside of a character class of `re`."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2)
    return "".join(rf"\u{start:04x}-\u{end - 1:04x}" for start, end in edges.tolist())
