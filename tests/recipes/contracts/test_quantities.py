"""Memory quantities."""

import pytest
from pydantic import ValidationError

from recipes.contracts.job import Hardware
from recipes.contracts.quantities import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("4Gi", 4 * 1024**3), ("512Mi", 512 * 1024**2), ("1.5G", 1.5e9), ("100", 100), ("1Pi", 1024**5), ("2P", 2e15)],
)
def test_memory_quantity_is_parsed_like_kubernetes(text: str, size: float) -> None:
    assert parse_bytes(text) == size
    assert Hardware(memory=text).memory == text


@pytest.mark.parametrize("text", ["much", "", "64GB", "64 Gi", "-4Gi", "1e3", "9" * 400])
def test_unparsable_memory_quantity_is_refused(text: str) -> None:
    with pytest.raises(
        ValidationError, match=f"memory '{text}' is not a quantity: write a number and a unit, such as 512Gi"
    ):
        Hardware(memory=text)
