"""Memory does not grow with the number of records, for planning and with every filter."""

import json
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from recipes.contracts.parameters import PrepareParameters
from recipes.preparation import encode_stage, read_stage
from recipes.preparation.pipeline import mark_duplicates
from recipes.preparation.plan import Plan, Range, save_array, write_table
from recipes.preparation.split_stage import assign_records
from tests.recipes.preparation.preparation_workspace import WORDS, Place, questions

ROOT = Path(__file__).resolve().parents[3]
RECORDS = 1_000
"""Records per range."""
HELD_BYTES = 1 << 16
EVERYTHING: dict[str, Any] = {
    "filter": {"near_dedup": {"threshold": 0.8, "permutations": 16}},
    "augment": {"oversample_minority": True},
}
BY_GROUP = {"split": {"group_by": "group"}, "filter": {"dedup": False}}
BY_COLUMN = {"split": {"column": "split"}}


def plan_with_summaries(folder: Path, ranges: int, parameters: dict[str, Any]) -> Plan:
    """Write a plan whose summaries have equal, near, masked, grouped and rare-class records."""
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
        write_table(plan.place(read_stage.STAGE, index, read_stage.SUMMARY_SUFFIX), table.schema, table.to_batches())
        signatures = random.integers(0, 1 << 32, (RECORDS, 16), np.uint32)
        signatures[1::10] = signatures[::10]
        save_array(plan.place(read_stage.STAGE, index, "npy"), signatures)
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
        write_table(plan.place(encode_stage.STAGE, index, read_stage.SUMMARY_SUFFIX), table.schema, table.to_batches())
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [EVERYTHING, BY_GROUP, BY_COLUMN])
def test_global_decisions_take_constant_memory_for_eight_times_the_records(
    tmp_path: Path, parameters: dict[str, Any]
) -> None:
    peaks = []
    for ranges in (10, 80):
        plan = plan_with_summaries(tmp_path / str(ranges), ranges, parameters)
        tracemalloc.start()
        mark_duplicates(plan)
        decided = assign_records(plan, [RECORDS] * ranges)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert decided.distinct == RECORDS * ranges
        left = [*plan.scratch.folder.rglob("*")]
        assert not left
    assert peaks[1] < 1.5 * peaks[0], peaks


EVERY_FILTER: dict[str, Any] = {
    "filter": {
        "language": "en",
        "min_length": 8,
        "max_length": 2000,
        "near_dedup": {"threshold": 0.8},
        "toxicity": {"words": ["scoundrel"]},
    },
    "augment": {"oversample_minority": True},
}
REASONS = {"duplicate", "near duplicate", "language", "toxicity", "no answer", "not JSON"}
SCRIPT = """
from functools import partial
import recipes.records.record_index
from recipes.prepare import main, prepare

recipes.records.record_index.MAX_SEGMENT_RECORDS = 1 << 14
main(partial(prepare, range_bytes=500_000, part_bytes=500_000, held_bytes=250_000, fan=8))
"""
"""Small units, so that a small input has as many as terabytes have in production.

Every bounded buffer is full before the smaller input has been read.
"""
FEW, MANY = 20_000, 240_000
GROWS_LESS_THAN = 20 << 20
"""Bytes of all processes together, for an input that grows by more than twice that."""


def every_kind(count: int) -> Iterator[dict[str, Any] | bytes]:
    """Generate records for every filter, from a vocabulary that is soon known completely."""
    draw = random.Random(1)
    for number, row in enumerate(questions(count)):
        row["instruction"] = " ".join([*row["instruction"].split()[:-1], *draw.choices(WORDS, k=5)]) + "?"
        row["class"] = "rare" if number % 10 == 0 else "often"
        if number % 7 == 0:
            row["answer"] += f" Write to keeper{number % 500}@example.com."
        if number % 17 == 0:
            row["answer"] += " You scoundrel!"
        if number % 19 == 0:
            row["answer"] = "Der Leuchtturm steht am Hafen und niemand schläft, bevor der Morgen über das Wasser kommt."
        yield row
        if number % 20 == 0:
            yield dict(row, id=number)
        if number % 25 == 0:
            yield dict(row, instruction=row["instruction"] + " Please")
        if number % 100 == 0:
            yield b"not json"


def peaks_of(program: "subprocess.Popen[bytes]") -> Counter[int]:
    """Return the peak memory of each process in bytes, without mapped files."""
    peaks: Counter[int] = Counter()
    while program.poll() is None:
        try:
            processes = [program.pid, *(each.pid for each in psutil.Process(program.pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            break
        for process in processes:
            try:
                status = Path(f"/proc/{process}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            own = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:")]
            peaks[process] = max(peaks[process], *own, 0)
        time.sleep(0.01)
    program.wait()
    return peaks


@pytest.mark.requirement("B14")
@pytest.mark.slow
@pytest.mark.long
def test_whole_program_takes_constant_memory_for_twelve_times_the_records(tmp_path: Path) -> None:
    peaks, sizes = [], []
    for count in (FEW, MANY):
        place = Place(tmp_path / str(count), every_kind(count))
        job = place.job({**EVERY_FILTER, "tokenize": place.tokenize(max_length=64)})
        job_file = place.folder / "job.json"
        job_file.write_text(job.model_dump_json())
        with (place.folder / "log").open("wb") as log:
            command = [sys.executable, "-c", SCRIPT, str(job_file)]
            program = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            peaks.append(sum(peaks_of(program).values()))
        assert program.returncode == 0, (place.folder / "log").read_text()
        sizes.append((place.folder / "raw" / "records.jsonl").stat().st_size)
        facts = json.loads(place.store.get_bytes(job.result_uri))["facts"]
        assert facts["rejected"].keys() >= REASONS and facts["masked"]["email"] and facts["oversampled"]["rare"]
    assert sizes[1] - sizes[0] > 2 * GROWS_LESS_THAN
    assert peaks[1] - peaks[0] < GROWS_LESS_THAN, peaks
