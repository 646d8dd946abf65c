"""What a base model cannot do is refused before it is loaded."""

from pathlib import Path

import pytest

from recipes import train as program
from recipes.schema import BadConfiguration
from tests.recipes.training.place import Place


def test_rows_longer_than_the_base_model_has_positions_are_refused_before_its_weights_are_loaded(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(program, "load_for_training")
    with pytest.raises(BadConfiguration, match=r"sequence_length is 513, and .* has 512 positions: lower it to 512 or less"):
        place.train(tmp_path / "long", sequence_length=513)
