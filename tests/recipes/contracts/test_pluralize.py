"""Singular and plural in messages and job logs."""

import pytest

from recipes.contracts.quantities import pluralize
from recipes.preparation.pipeline import PreparationSummary
from recipes.prepare import describe_prepared
from recipes.storage.checksums import find_difference
from recipes.storage.manifest import FileRecord
from recipes.training.data.examples import ExampleTally

NOTHING = PreparationSummary(
    records={}, rejected={}, masked={}, oversampled={}, leaked=0, truncated=0, retyped=(), filled={}, lines=1
)


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (11, "11 files"), (1200, "1,200 files")]
)
def test_count_is_singular_or_plural(number: int, words: str) -> None:
    assert pluralize(number, "file") == words


@pytest.mark.parametrize(("number", "words"), [(1, "1 process"), (2, "2 processes")])
def test_plural_of_word_ending_in_s_adds_es(number: int, words: str) -> None:
    assert pluralize(number, "process") == words


def test_log_uses_singular_for_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the log had `1 records` and `1 lines`."""
    ExampleTally(8, records=1, num_kept=1, cut=1).report_losses()
    said = capsys.readouterr().out + describe_prepared(NOTHING)
    assert "1 of 1 record cut at sequence_length 8: what is said behind it is not learned" in said
    assert "1 line -> ;" in said


def test_message_uses_singular_for_one_byte() -> None:
    """Regression: the message had `1 bytes`."""
    file = FileRecord(path="rows", sha256="", size=1200)
    assert find_difference(file, 1, "") == "rows has 1 byte, recorded are 1,200"
