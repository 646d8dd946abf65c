from typing import get_args

import pytest

from recipes.contracts.dataset_formats import ENDINGS, Format, FormatName, has_format


def test_every_format_has_a_name_in_schemas_and_file_endings() -> None:
    assert [*Format] == [*get_args(FormatName)] == [*ENDINGS]


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a.jsonl", Format.JSONL, True),
        ("A.CSV.GZ", Format.CSV, True),
        ("a.feather", Format.ARROW, True),
        ("a.parquet.zst", Format.PARQUET, False),
        ("a.csv", Format.JSONL, False),
    ],
)
def test_file_name_tells_its_format(name: str, format: Format, expected: bool) -> None:
    assert has_format(name, format) is expected
