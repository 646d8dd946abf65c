"""What the first pod finds out of all records takes no more memory for eight times the records."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recipes.parameters import PrepareParameters
from recipes.preparation import encoding, reading
from recipes.preparation.deciding import decide
from recipes.preparation.pipeline import find_duplicates
from recipes.preparation.plan import Plan, Range
from recipes.preparation.tables import save_array, write_table

RECORDS = 1_000
"""Of a range."""
HELD_BYTES = 1 << 16
EVERYTHING: dict[str, Any] = {
    "filter": {"near_dedup": {"threshold": 0.8, "permutations": 16}},
    "augment": {"oversample_minority": True},
}
BY_GROUP = {"split": {"group_by": "group"}, "filter": {"dedup": False}}
BY_COLUMN = {"split": {"column": "split"}}


def told_plan(folder: Path, ranges: int, parameters: dict[str, Any]) -> Plan:
    """A plan whose ranges have told of their records: some equal, near, masked, in groups and of rare classes."""
    plan = Plan(
        folder,
        tuple(Range("records.jsonl", number, number + 1) for number in range(ranges)),
        PrepareParameters.model_validate(parameters),
        held_bytes=HELD_BYTES,
    )
    random = np.random.default_rng(1)
    for index in range(ranges):
        digests = random.integers(0, 1 << 64, (RECORDS, 2), np.uint64)
        digests[:50] = np.arange(50, dtype=np.uint64)[:, None] << np.uint64(40)
        digest = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), RECORDS, [None, pa.py_buffer(digests.tobytes())])
        table = pa.table({"line": np.arange(RECORDS, dtype=np.int32), "digest": digest})
        write_table(plan.place(reading.STAGE, index, reading.TOLD), table.schema, table.to_batches())
        signatures = random.integers(0, 1 << 32, (RECORDS, 16), np.uint32)
        signatures[1::10] = signatures[::10]
        save_array(plan.place(reading.STAGE, index, "npy"), signatures)
        draw = random.integers(0, 1 << 64, RECORDS, np.uint64)
        masked = draw.copy()
        masked[:20] = random.integers(0, 1 << 64, 20, np.uint64)
        masked[20:25] = 7
        table = pa.table(
            {
                "draw": draw,
                "masked": masked,
                "split": np.arange(RECORDS, dtype=np.int8) % 3,
                "group": [f"group {number % 90}" for number in range(RECORDS)],
                "class": ["often" if number % 8 else "rare" for number in range(RECORDS)],
            }
        )
        write_table(plan.place(encoding.STAGE, index, reading.TOLD), table.schema, table.to_batches())
    return plan


@pytest.mark.parametrize("parameters", [EVERYTHING, BY_GROUP, BY_COLUMN])
def test_eight_times_the_records_take_the_same_memory(tmp_path: Path, parameters: dict[str, Any]) -> None:
    peaks = []
    for ranges in (10, 80):
        plan = told_plan(tmp_path / str(ranges), ranges, parameters)
        tracemalloc.start()
        find_duplicates(plan)
        decided = decide(plan, [RECORDS] * ranges)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert decided.distinct == RECORDS * ranges
        left = [*plan.scratch.folder.rglob("*")]
        assert not left
    assert peaks[1] < 1.5 * peaks[0], peaks
