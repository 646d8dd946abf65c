"""Cleaning: missing values and outliers are rejected or filled before any other stage."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.contracts.parameters import CleanParameters, PrepareParameters
from recipes.storage.manifest import canonical_json
from resources.datasets.prepared_versions import prepared_schema
from tests.recipes.preparation.preparation_workspace import Place, questions

CLEAN = {
    "required": ["author"],
    "fill": {"system": "Answer briefly.", "level": 1},
    "within": {"score": {"min": 0, "max": 5}},
}


def table(count: int) -> list[dict[str, Any]]:
    """Generate questions with occasional missing values and numeric outliers."""
    rows = []
    for number, row in enumerate(questions(count)):
        row |= {"author": f"a{number % 7}", "system": "Be kind.", "level": 3, "score": number % 5}
        if number % 10 == 1:
            row["author"] = (None, "", "  ")[number % 3]
        if number % 10 == 2:
            del row["system"]
        if number % 10 == 3:
            row["level"] = None
        if number % 10 == 4:
            row["score"] = (-0.5, 5.01, 1e300, "4", True)[number // 10 % 5]
        if number % 10 == 5:
            row["score"] = None
        rows.append(row)
    return rows


@pytest.mark.requirement("C6")
def test_missing_values_are_filled_or_rejected_and_outliers_rejected(tmp_path: Path) -> None:
    place = Place(tmp_path, table(100))
    result = place.prepare({"clean": CLEAN, "augment": {"shuffle_seed": None}})
    assert result.facts["rejected"] == {"missing value": 10, "outlier": 10}
    assert result.facts["filled"] == {"level": 10, "system": 10}
    expected = []
    for number, row in enumerate(table(100)):
        if number % 10 not in (1, 4):
            expected.append({**row, "system": row.get("system") or "Answer briefly.", "level": row["level"] or 1})
    made = place.rows(result)
    assert sorted(map(canonical_json, made)) == sorted(map(canonical_json, expected))
    rejects = {reject["line"]: (reject["reason"], reject["detail"]) for reject in place.rows(result, "rejected")}
    assert rejects[2] == ("missing value", "'author' is missing")
    assert rejects[5] == ("outlier", "'score' is below 0")
    assert rejects[15] == ("outlier", "'score' is above 5")
    assert rejects[35] == rejects[45] == ("outlier", "'score' is not a number")


@pytest.mark.slow
def test_cleaning_is_independent_of_process_count(tmp_path: Path) -> None:
    place = Place(tmp_path, table(300), {"range_bytes": 5_000, "part_bytes": 10_000})
    one, two = (place.prepare({"clean": CLEAN}, workers=count) for count in (1, 2))
    assert place.files(one) == place.files(two) and one == two


def test_filled_text_counts_in_layout_detection_and_deduplication(tmp_path: Path) -> None:
    """Filling happens before the layout is detected and before duplicates are compared."""
    rows: list[dict[str, Any]] = [
        {"instruction": f"what is {number}?", "answer": "" if number == 5 else "a"} for number in range(20)
    ]
    place = Place(tmp_path, [*rows, {"instruction": "what is 5?", "answer": "unknown"}])
    result = place.prepare({"clean": {"fill": {"answer": "unknown"}}, "split": {"validation": 0.2, "test": 0.2}})
    assert result.facts["rejected"] == {"duplicate": 1}
    assert [row["answer"] for row in place.rows(result) if row["instruction"] == "what is 5?"] == ["unknown"]


def test_personal_data_in_filled_value_is_masked(tmp_path: Path) -> None:
    rows = [dict(row, contact=None if number % 2 else "nobody") for number, row in enumerate(questions(40))]
    place = Place(tmp_path, rows)
    result = place.prepare({"clean": {"fill": {"contact": "write to keeper@example.com"}}})
    assert {row["contact"] for row in place.rows(result)} == {"nobody", "write to [REDACTED]"}


def test_parameters_without_cleaning_omit_its_key() -> None:
    assert "clean" not in PrepareParameters().model_dump(mode="json")


@pytest.mark.parametrize(
    ("clean", "said"),
    [
        ({"within": {"score": {}}}, "set min, max, or both"),
        ({"within": {"score": {"min": 2, "max": 1}}}, "no number is at least 2 and at most 1: swap min and max"),
        ({"within": {"score": {"min": float("nan")}}}, "finite number"),
        ({"required": ["a"], "fill": {"a": 1}}, "'a' is required and filled"),
        ({"fill": {"a": None}}, "the value of 'a' is itself missing"),
        ({"fill": {"a": " "}}, "the value of 'a' is itself missing"),
        ({"fil": {"a": 1}}, "fil"),
    ],
)
def test_invalid_cleaning_parameters_are_refused(clean: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PrepareParameters.model_validate({"clean": clean})
    assert said in str(refused.value)


def test_schema_reflects_filled_required_and_retyped_columns() -> None:
    parameters = PrepareParameters(clean=CleanParameters(required=("a",), fill={"b": "x", "c": 2, "d": True}))
    parent = {"a": "null|string?", "b": "integer|null?", "c": "integer?", "d": "null", "e": "number?"}
    made = prepared_schema(parent, parameters, {"retyped": ["e"], "filled": {"b": 3, "d": 1}})
    assert made == {"a": "string", "b": "integer|string", "c": "integer", "d": "boolean", "e": "number|string?"}
