"""Detect and mask personal data (PII) and secrets."""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

REDACTED = "[REDACTED]"


@dataclass(frozen=True)
class PersonalDataKind:
    """A kind of personal data: a pattern and a validator of its matches.

    The group `keep` of a match stays in the text. `trace` is an RE2 pattern that matches every JSON line with a text that
    contains this kind.
    """

    name: str
    trace: str
    pattern: re.Pattern[str]
    is_valid: Callable[[str], bool] = lambda _: True


def is_card_number(text: str) -> bool:
    """Return whether a card number has a valid check digit and distinct digits (ISO/IEC 7812)."""
    digits = [int(letter) for letter in text if letter.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


def is_iban(text: str) -> bool:
    """Return whether an IBAN is 1 modulo 97 (ISO 13616)."""
    packed = text.replace(" ", "")
    number = "".join(str(int(letter, 36)) for letter in packed[4:] + packed[:4])
    return 15 <= len(packed) <= 34 and int(number) % 97 == 1


def is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_ipv6_address(text: str) -> bool:
    """Return whether a text is an IPv6 address.

    Excludes times of day, and `::` in source code.
    """
    return is_ip_address(text) and (text.count(":") == 7 or ("::" in text and len(text) > 5))


def is_phone_number(text: str) -> bool:
    """E.164 allows 15 digits.

    Fewer than 8 are more often a year, a price or a line number.
    """
    return 8 <= sum(letter.isdigit() for letter in text) <= 15


IBAN_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 "
    "ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 "
    "LB28 LC32 LI21 LT20 LU20 LV21 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 "
    "RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
)
"""Country and length, from the SWIFT registry: without it, a word in capitals after an IBAN would be taken as its end."""

IBAN_PATTERN = "|".join(rf"{code[:2]}\d{{2}}(?: ?[A-Z0-9]){{{int(code[2:]) - 4}}}" for code in IBAN_LENGTHS.split())

SECRET_NAMES = r"api[_-]?key|secret(?:[_-]?(?:access[_-]?)?key)?|access[_-]?token|auth[_-]?token|passw(?:or)?d|pwd"

KINDS = (
    PersonalDataKind(
        "private_key",
        "PRIVATE KEY-----",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    ),
    PersonalDataKind("token", r"\.eyJ", re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")),
    PersonalDataKind(
        "api_key",
        r"AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|hf_|sk-|[sr]k_(?:live|test)_|xox[abprs]-|AIza",
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}|glpat-[\w-]{20,}|"
            r"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|"
            r"AIza[\w-]{35})(?![A-Za-z0-9])"
        ),
    ),
    PersonalDataKind(
        "secret",
        rf"(?i:{SECRET_NAMES})(?:\\[nrtf]|[^A-Za-z0-9=:]){{0,5}}[=:]",
        re.compile(
            rf"(?i)(?P<keep>\b[\w-]*(?:{SECRET_NAMES})[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?)(?!\[REDACTED\])[^\s\"',;]{{8,}}"
        ),
    ),
    PersonalDataKind(
        "email",
        r"@[A-Za-z0-9][A-Za-z0-9-]*\.",
        re.compile(r"[A-Za-z0-9](?:[\w.%+-]{0,63})@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}\b"),
    ),
    PersonalDataKind("iban", r"[A-Z]{2}\p{Nd}{2} ?[A-Z0-9]", re.compile(rf"\b(?:{IBAN_PATTERN})(?![A-Z0-9])"), is_iban),
    PersonalDataKind(
        "card",
        r"\p{Nd}(?:[ -]?\p{Nd}){12}",
        re.compile(r"(?<![\w.+-])(?<![A-Z]{2}\d{2} )[2-6]\d{3}(?:[ -]?\d){9,15}(?![\w-]|\.\d)"),
        is_card_number,
    ),
    PersonalDataKind(
        "ssn",
        r"\p{Nd}-\p{Nd}{2}-\p{Nd}",
        re.compile(r"(?<![\w-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])"),
    ),
    PersonalDataKind(
        "ip_address",
        r"\p{Nd}\.\p{Nd}{1,3}\.\p{Nd}{1,3}\.\p{Nd}",
        re.compile(
            r"(?<![\w.:-])(?<!version )(?<!Version )(?<!release )(?<!Release )(?<!section )(?<!Section )"
            r"\d{1,3}(?:\.\d{1,3}){3}(?![\w-]|\.\d)"
        ),
        is_ip_address,
    ),
    PersonalDataKind(
        "ip_address",
        r"[0-9A-Fa-f]::|::[0-9A-Fa-f]|(?::[0-9A-Fa-f]{1,4}){3}",
        re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])"),
        is_ipv6_address,
    ),
    PersonalDataKind(
        "phone",  # with country code, of North America, or with trunk prefix
        r"\p{Nd}(?:[ ./()-]{0,4}\p{Nd}){7}",
        re.compile(
            r"(?<![\w.+/-])(?:(?<!\d )(?:\+|00)[1-9]\d{0,2}(?:[ ./-]?\(0?\d{0,4}\))?(?:[ ./-]?\d){6,13}"
            r"|(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[ .-])[2-9]\d{2}[ .-]\d{4}"
            r"|(?<!\d )\(?0[1-9]\d{1,4}\)?[ /-]\d{3,4}(?:[ /-]?\d{2,4}){1,2})(?![\w-]|\.\d)"
        ),
        is_phone_number,
    ),
)
"""In the order of their search: later kinds do not see what earlier ones replaced."""

CARD_KIND = next(kind for kind in KINDS if kind.name == "card")
CARD_NUMBER_RANGE = range(10**12, 10**19)
"""Integers with the length of a card number, which are stored as numbers as often as texts."""

ESCAPED_LETTER = r"\\[u/]"
"""An escaped letter in JSON, which could stand for any of these characters."""
ANY_TRACE = "|".join([ESCAPED_LETTER, *(kind.trace for kind in KINDS)])

PersonalDataKinds = tuple[PersonalDataKind, ...]


def find_suspected_kinds(lines: pa.Array) -> list[PersonalDataKinds]:
    """Return the kinds that each line (JSON or plain text) may contain.

    Takes 1 us a line; Python's patterns take 40.
    """
    found: list[PersonalDataKinds] = [()] * len(lines)
    texts = lines.view(pa.large_string())  # makes RE2 match characters instead of bytes; invalid UTF-8 never matches
    rows = np.flatnonzero(matches_pattern(texts, ANY_TRACE))
    chosen = texts.take(pa.array(rows))
    each = np.stack([matches_pattern(chosen, f"{ESCAPED_LETTER}|{kind.trace}") for kind in KINDS], axis=1)
    for row, held in zip(rows.tolist(), each.tolist(), strict=True):
        found[row] = tuple(compress(KINDS, held))
    return found


def matches_pattern(texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    return found


def mask_text(text: str, counts: Counter[str], kinds: PersonalDataKinds = KINDS) -> str:
    """Mask personal data of these kinds, in the order of `KINDS`, and count it."""
    for kind in kinds:

        def replace(match: re.Match[str], kind: PersonalDataKind = kind) -> str:
            if not kind.is_valid(match[0]):
                return match[0]
            counts[kind.name] += 1
            return str(match.groupdict().get("keep") or "") + REDACTED

        text = kind.pattern.sub(replace, text)
    return text


def mask_value(value: Any, counts: Counter[str], kinds: PersonalDataKinds = KINDS) -> Any:
    """Mask all texts and integer card numbers in a JSON value recursively.

    Keys of objects are kept.
    """
    if isinstance(value, str):
        return mask_text(value, counts, kinds)
    if type(value) is int and value in CARD_NUMBER_RANGE and CARD_KIND in kinds:
        digits = str(value)
        return value if (masked := mask_text(digits, counts, (CARD_KIND,))) == digits else masked
    if isinstance(value, list):
        return [mask_value(item, counts, kinds) for item in value]
    if isinstance(value, dict):
        return {key: mask_value(item, counts, kinds) for key, item in value.items()}
    return value
