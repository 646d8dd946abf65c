"""A masked question keeps its split from before masking, with all questions equal after masking."""

from pathlib import Path
from typing import Any

import pytest

from recipes.contracts.parameters import SplitParameters
from recipes.preparation.read_stage import draw_ranks
from recipes.preparation.split_assignment import SPLITS
from tests.recipes.preparation.preparation_workspace import Place
from tests.recipes.split_rows import divided

SMALL = {"range_bytes": 2_000, "part_bytes": 3_000, "held_bytes": 500}


def asked(count: int, question: str) -> list[dict[str, Any]]:
    return [{"instruction": question.format(n), "answer": f"Ship {n} does.", "id": n} for n in range(count)]


def splits_of(place: Place, **parameters: Any) -> dict[int, str]:
    """Return the split of each record of a preparation, by record number."""
    result = place.prepare(parameters)
    assert result.facts["leaked"] == 0
    return {row["id"]: name for name in SPLITS for row in place.rows(result, name)}


def before(rows: list[dict[str, Any]]) -> dict[int, str]:
    """Return the splits of the same records in the unmasked version."""
    places, _ = divided(rows, SplitParameters())
    return {row["id"]: SPLITS[place] for row, place in zip(rows, places, strict=True)}


def test_masked_version_holds_out_the_same_records_as_its_parent(tmp_path: Path) -> None:
    rows = asked(200, "Which ship brings letters of keeper{0}@example.com to harbour {0}?")
    place = Place(tmp_path, rows, SMALL)
    found = splits_of(place)
    assert "[REDACTED]" in place.rows(place.prepare({}), "test")[0]["instruction"]
    assert found == before(rows)
    assert set(found.values()) == set(SPLITS)


@pytest.mark.parametrize("dedup", [True, False])
def test_questions_made_equal_by_masking_share_one_held_out_split(tmp_path: Path, dedup: bool) -> None:
    """If the earlier version held out any of them, all are held out."""
    rows = asked(200, "Which ship comes to harbour {0}?")
    for row in rows[:12]:
        row["instruction"] = f"Which ship brings letters of keeper{row['id']}@example.com?"
    was = before(rows)
    assert {was[number] for number in range(12)} > {"train"}
    found = splits_of(Place(tmp_path, rows, SMALL), filter={"dedup": dedup})
    assert len({found[number] for number in range(12)}) == 1
    assert found[0] != "train"


def test_equal_questions_share_a_split_although_only_one_is_masked(tmp_path: Path) -> None:
    """The key pattern is case-sensitive, equality of questions is not."""
    key = "AKIA" + "ABCD1234" * 2
    rows = asked(300, "Which ship comes to harbour {0}?")
    for row in rows[:100]:
        number = row["id"] // 2
        row["instruction"] = f"Whose is {key if row['id'] % 2 else key.lower()} of {number}?"
    place = Place(tmp_path, rows, SMALL)
    found = splits_of(place)
    masked = sum("[REDACTED]" in row["instruction"] for row in place.rows(place.prepare({})))
    assert masked == 50
    assert found == before(rows)


def test_another_seed_draws_different_ranks() -> None:
    assert draw_ranks(["Who?"], 1) == draw_ranks(["who"], 1) != draw_ranks(["Who?"], 2)
