"""Statistics of records: exact where stated, and independent of block boundaries."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.dataset_contract import Measures, Slices, ValidateParameters
from recipes.contracts.parameters import NearDuplicates
from recipes.contracts.validation_results import Statistics
from recipes.validate import validate_records
from recipes.validation import record_blocks as blocks_module
from recipes.validation.record_blocks import iterate_lines

TEXT = "The keeper of the lamp walks up the hill each night and comes down again in the grey of the morning"


def describe(folder: Path, rows: list[dict[str, Any]], **measures: Any) -> Statistics:
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    statistics, violations = validate_records(
        iterate_lines([file]), ValidateParameters(measures=Measures(**measures)), len(rows), folder
    )
    assert violations.count == 0
    return statistics


@pytest.mark.requirement("B13")
def test_counts_types_completeness_and_lengths(tmp_path: Path) -> None:
    found = describe(
        tmp_path, [{"text": "one two", "n": 1}, {"text": "", "n": 2.5}, {"text": None}, {"text": "ä-b", "n": 4}]
    )
    text, number = found.columns["text"], found.columns["n"]
    assert (text.kinds, text.filled) == ({"null": 1, "string": 3}, 2)
    assert (number.kinds, number.filled) == ({"integer": 2, "missing": 1, "number": 1}, 3)
    assert text.lengths is not None and (text.lengths.mean, text.lengths.maximum) == (pytest.approx(10 / 3), 7)
    assert number.numbers is not None and number.numbers.sample == (1.0, 2.5, 4.0)
    assert found.words.sample == (0.0, 0.0, 2.0, 2.0)
    assert found.vocabulary.top == {"one": 1, "two": 1, "ä": 1, "b": 1}
    assert found.layouts == {"none": 2, "text": 2}


def test_exact_and_near_duplicates_are_counted_separately(tmp_path: Path) -> None:
    rows = [{"text": f"{TEXT} {word}"} for word in ("once", "once", "once", "twice")] + [
        {"text": "something else altogether"}
    ]
    found = describe(tmp_path, rows, near_duplicates=NearDuplicates(threshold=0.7))
    assert (found.duplicates, found.near_duplicates) == (2, 1)


def test_personal_data_is_counted_by_kind_without_lookalikes(tmp_path: Path) -> None:
    rows = [
        {"text": "ann@example.com and bob@example.com"},
        {"text": "version 1.2.3.4"},
        {"deep": [{"x": "10.1.2.3"}], "text": "t"},
    ]
    assert describe(tmp_path, rows).personal_data == {"email": 2, "ip_address": 1}


def test_records_without_a_layout_are_compared_as_a_whole(tmp_path: Path) -> None:
    """Regression: without a layout all had the same empty text, and so were duplicates."""
    rows = [{"n": n, "m": n * n} for n in range(20)] + [{"m": 9, "n": 3}, {"n": 1, "at": "x"}, {"n": 2, "at": "x"}]
    found = describe(tmp_path, rows, near_duplicates=NearDuplicates(threshold=0.9))
    assert (found.layouts, found.duplicates, found.near_duplicates) == ({"none": 23}, 1, 0)


def test_card_numbers_stored_as_integers_are_counted(tmp_path: Path) -> None:
    rows = [
        {"text": "paid", "card": 4111111111111111},
        {"text": "paid", "all": [{"card": 378282246310005}, 4111111111111112]},
        {"text": "paid", "at": 1_700_000_000_000, "n": 10**400, "ok": True},
    ]
    assert describe(tmp_path, rows).personal_data == {"card": 2}


def test_languages_are_counted(tmp_path: Path) -> None:
    rows = [{"text": TEXT}, {"text": "Der Wärter der Lampe geht jede Nacht den Hügel hinauf"}, {"text": TEXT.lower()}]
    assert describe(tmp_path, rows).languages == {"en": 2, "de": 1}


@pytest.mark.requirement("B13")
def test_newest_timestamp_is_found_in_any_format(tmp_path: Path) -> None:
    rows = [{"at": "2024-05-01T00:00:00Z"}, {"at": 1_700_000_000}, {"at": "yesterday"}, {"at": "2024-05-02"}]
    assert describe(tmp_path, rows, timestamp="at").newest == 1_714_608_000_000
    for none in ("never", 10**400, -(10**400), 1e308, True):
        assert describe(tmp_path, [{"at": none}], timestamp="at").newest is None


def test_slices_have_their_share_length_and_labels(tmp_path: Path) -> None:
    rows = [{"text": "ab", "region": "north", "label": "yes"}] * 3 + [{"text": "abcd", "region": "south", "label": "no"}]
    slices = describe(tmp_path, rows, slices=Slices(columns=("region",), label="label")).slices
    assert [(each.value, each.records, each.mean_characters, each.labels) for each in slices] == [
        ("north", 3, 2.0, {"yes": 3}),
        ("south", 1, 4.0, {"no": 1}),
    ]


def test_statistics_are_independent_of_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{TEXT} {n % 7}", "n": n, **({"late": True} if n > 150 else {})} for n in range(200)]
    whole = describe(tmp_path, rows, sample=100)
    monkeypatch.setattr(blocks_module, "MAX_BLOCK_RECORDS", 13)
    assert describe(tmp_path, rows, sample=100) == whole
    assert whole.columns["late"].kinds == {"boolean": 49, "missing": 151}


def test_sample_is_bounded_and_moments_cover_all_records(tmp_path: Path) -> None:
    found = describe(tmp_path, [{"n": n} for n in range(5000)], sample=500, near_duplicates=None, languages=False)
    numbers = found.columns["n"].numbers
    assert numbers is not None and (numbers.count, numbers.minimum, numbers.maximum, numbers.mean) == (5000, 0, 4999, 2499.5)
    assert 400 < found.sampled == len(numbers.sample) < 600
    assert abs(sum(numbers.sample) / len(numbers.sample) - 2499.5) < 300
