"""Split rows as the program split does, within a small memory limit."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.contracts.parameters import SplitParameters
from recipes.records.disk_partitions import Scratch
from recipes.split import split_rows

HELD_BYTES = 200


def divided(rows: list[dict[str, Any]], parameters: SplitParameters) -> tuple[NDArray[np.int8], int]:
    """Return each row's index in `SPLITS`, and the number of leaked rows."""
    with TemporaryDirectory() as folder:
        found = split_rows(rows, parameters, Scratch(Path(folder), HELD_BYTES))
        return found.splits.reader().take(len(rows)), found.leaked
