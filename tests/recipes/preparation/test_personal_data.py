"""Personal data: found in every usual spelling and counted by kind; lookalikes stay unchanged."""

import json
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recipes.preparation.personal_data import find_suspected_kinds, mask_text, mask_value
from recipes.storage.manifest import canonical_json

FOUND = {
    "email": ["ann.b+c@mail.example.co.uk", "x@sub.domain.museum"],
    "phone": [
        "+49 30 901820",
        "+1 (415) 555-2671",
        "(415) 555-2671",
        "415-555-2671",
        "1-800-555-0199",
        "0171/1234567",
        "030 901820-12",
        "0044 20 7946 0958",
    ],
    "card": ["4111 1111 1111 1111", "5500-0000-0000-0004", "378282246310005"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "FR1420041010050500013M02606"],
    "ssn": ["078-05-1120"],
    "ip_address": ["192.168.0.1", "2001:db8:85a3::8a2e:370:7334", "fe80::1ff:fe23:4567:890a"],
    "api_key": ["AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "sk-proj-abcdefghijklmnopqrstuvwx"],
    "token": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN"],
    "private_key": ["-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"],
}
LOOK_ALIKES = [
    "version 10.0.19041.1",
    "v1.2.3.4",
    "version 1.2.3.4",
    "Python 3.11.7",
    "1.2.3.4.5",
    "999.1.1.1",
    "4111 1111 1111 1112",
    "DE89 3704 0044 0532 0130 01",
    "12:30:45",
    "2024-05-17 10:22:33",
    "20240517103000",
    "1,234,567 cases",
    "1000000 dollars",
    "3.14159265358979",
    "ISBN 978-3-16-148410-0",
    "000-12-3456",
    "std::vector::at",
    "a::b",
    "a@b",
    "1914-1918",
    "lines 120-130 and 555-1234",
    "token: yes",
    "sk-learn",
]


@pytest.mark.requirement("C3", "D1")
@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in FOUND.items() for text in texts])
def test_each_kind_of_personal_data_is_replaced_and_counted(kind: str, text: str) -> None:
    counts: Counter[str] = Counter()
    assert mask_text(f"Look: {text}, please.", counts) == "Look: [REDACTED], please."
    assert counts == {kind: 1}


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_lookalike_text_is_not_masked(text: str) -> None:
    counts: Counter[str] = Counter()
    assert mask_text(f"Look: {text} here", counts) == f"Look: {text} here"
    assert not counts


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("api_key=abcd1234efgh next", "api_key=[REDACTED] next"),
        ('"password": "hunter2hunter2"', '"password": "[REDACTED]"'),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "aws_secret_access_key = [REDACTED]"),
    ],
)
def test_masking_a_secret_keeps_its_key_name(text: str, masked: str) -> None:
    counts: Counter[str] = Counter()
    assert mask_text(text, counts) == masked
    assert counts == {"secret": 1}


def test_masking_twice_changes_nothing() -> None:
    counts: Counter[str] = Counter()
    text = ", ".join(text for texts in FOUND.values() for text in texts) + " api_key=abcd1234efgh"
    once = mask_text(text, counts)
    assert mask_text(once, Counter()) == once


SCRAPS = [
    *(text for texts in FOUND.values() for text in texts),
    *LOOK_ALIKES,
    *(
        "password",
        "api_key",
        "Secret-Key",
        "pwd",
        "pa\u017f\u017fword",
        "::",
        "2001:db8::",
        "+49 () 30901820",
        "ann@",
        "\u00e9@a.io",
    ),
    *(
        "\u0661\u0662\u0663",
        "4111 1111 1111 \u0661\u0661\u0661\u0661",
        "=",
        ":",
        '"',
        "'",
        "\\",
        "/",
        "(",
        ")",
        "-",
        ".",
        "+",
        "0",
        "9",
    ),
    *(
        "\n",
        "\t",
        "\r",
        "\f",
        "\x1c",
        "\x85",
        "\u00a0",
        "\u2003",
        " ",
        "  ",
        "F",
        "a",
        "Z",
        "\u00e9",
        "\u4e2d",
        "\U0001f600",
    ),
]


@given(st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=8).map("".join), st.booleans())
@settings(max_examples=300, deadline=None)
@example("passwd\n\t: hunter2hunter2", False)
@example("ask \u00e9\u00e9x\u00e9@mail.example", False)
@example("host 2001:db8:: is up", False)
@example("+\u0661\u0662 \u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663", True)
def test_suspicion_prefilter_does_not_change_what_is_masked(text: str, escaped: bool) -> None:
    """Kinds ruled out by the prefilter are not searched for."""
    row = {"answer": text}
    line = json.dumps(row).replace("/", "\\/").encode() if escaped else canonical_json(row)
    slowly, quickly = Counter[str](), Counter[str]()
    (kinds,) = find_suspected_kinds(pa.array([line], pa.large_binary()))
    assert mask_value(row, quickly, kinds) == mask_value(row, slowly)
    assert quickly == slowly


def test_plain_text_is_not_suspected() -> None:
    lines = [b'{"answer":"The keeper counts 1947 ships.","instruction":"Who?","key":"keeper"}', b"\xff\xfe no UTF-8"]
    assert find_suspected_kinds(pa.array(lines, pa.large_binary())) == [(), ()]


def test_texts_are_masked_however_deep_and_keys_stay() -> None:
    counts: Counter[str] = Counter()
    row = {"messages": [{"role": "user", "content": "I am a@example.com"}], "n": 5, "a@example.com": None}
    assert mask_value(row, counts) == {
        "messages": [{"role": "user", "content": "I am [REDACTED]"}],
        "n": 5,
        "a@example.com": None,
    }
    assert counts == {"email": 1}


def test_integer_card_number_is_masked() -> None:
    row = {"card": 4111111111111111, "all": [378282246310005, {"deep": 5500000000000004}], "text": "paid"}
    counts: Counter[str] = Counter()
    (kinds,) = find_suspected_kinds(pa.array([canonical_json(row)], pa.large_binary()))
    assert mask_value(row, counts, kinds) == {
        "card": "[REDACTED]",
        "all": ["[REDACTED]", {"deep": "[REDACTED]"}],
        "text": "paid",
    }
    assert counts == {"card": 3}


@pytest.mark.parametrize(
    "number", [4111111111111112, 1_700_000_000_000, -4111111111111111, 41, 10**30, True, 4111111111111111.0]
)
def test_number_that_is_not_a_card_keeps_value_and_type(number: float) -> None:
    counts: Counter[str] = Counter()
    masked = mask_value([number], counts)
    assert masked == [number] and type(masked[0]) is type(number) and not counts
