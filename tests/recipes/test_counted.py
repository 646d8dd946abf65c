"""Of one thing there is one."""

import pytest

from recipes.counted import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (11, "11 files"), (1200, "1,200 files")]
)
def test_what_is_counted_is_said_as_people_do(number: int, words: str) -> None:
    assert counted(number, "file") == words
