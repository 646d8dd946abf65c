"""Measure tracing which models saw a record: cost of the index, and query times.

Generates records of 500 bytes, creates a version with and without an index, trains nothing, and queries. The lower bound is
`grep` over the same lines. Usage: `python benchmarks/record_trace.py [--records 1000000] [--folder FOLDER]`.
"""

import argparse
import json
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from recipes.contracts.job import StoreAddress
from recipes.records.record_index import INDEX_ENTRY, find_index
from recipes.storage.artifact_store import Store
from resources.ingest.version_creation import create_version
from resources.lineage.record_search import trace_matches
from resources.lineage.trace import Tracer
from resources.metadata.database import Database

BYTES = 500
LOOKUPS = 100
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
WORDS = [
    f"{a}{b}{c}" for a in ("ba", "ke", "li", "mo", "tu", "sa") for b in "nrstlm" for c in ("an", "ed", "ing", "o", "us")
]
"""Made up, so that no record contains the searched text by chance."""


def rows(count: int, seed: int = 7) -> Iterator[dict[str, Any]]:
    """Generate distinct records of about 500 bytes."""
    draw = random.Random(seed)
    for number in range(count):
        said = " ".join(draw.choices(WORDS, k=70))
        row = {"instruction": f"Question {number}: {said[:150]}?", "answer": said}
        room = BYTES - len(json.dumps(row))
        yield {**row, "answer": said[: len(said) + min(0, room)]}


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return wall seconds, processor seconds including children, and the result."""
    began, used = time.perf_counter(), processor_seconds()
    answer = work()
    return time.perf_counter() - began, processor_seconds() - used, answer


def processor_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), options.records)


def measure(folder: Path, count: int) -> None:
    raw = folder / "raw.jsonl"
    wanted: list[dict[str, Any]] = []
    with raw.open("w") as out:
        for number, row in enumerate(rows(count)):
            out.write(json.dumps(row) + "\n")
            if number % max(1, count // LOOKUPS) == 0:
                wanted.append(row)
    wanted = wanted[:LOOKUPS]
    size = raw.stat().st_size
    print(f"{count:,} records, {size / 1e6:,.0f} MB\n")

    database = Database(f"sqlite:///{folder}/metadata.db")
    database.migrate()
    store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))

    def create(name: str, path: Path = raw) -> Any:
        # Chunks belong to an organization, so each version stores all of its own.
        return create_version(database, store, name="corpus", path=path, user="bench", organization=name)[0]

    few = folder / "few.jsonl"
    few.write_text('{"text": "loads all that is loaded once"}\n')
    create("first", few)
    with patch("resources.ingest.record_writer.RecordIndexFile.add", new=lambda *_: None):
        without = timed(lambda: create("plain"))
    indexed = timed(lambda: create("default"))
    version = indexed[2]
    index = find_index(store, version.artifact)
    assert index is not None
    index_bytes = sum(segment.count for segment in index.records) * INDEX_ENTRY.itemsize
    line("create, without an index", without, f"{size / 1e6 / without[1]:.0f} MB per cpu-second")
    line("create, with it", indexed, f"{size / 1e6 / indexed[1]:.0f} MB per cpu-second")
    share = f"{index_bytes / size:.1%} of the records, {len(index.records)} segments"
    print(f"{'the index':<44}{index_bytes / 1e6:>9.1f} MB   {share}")

    opened = timed(lambda: Tracer(database, store, "default"))
    tracer: Tracer = opened[2]
    line("open all indexes", opened)
    tracer.trace({"text": "loads all that is loaded once"})
    first = timed(lambda: tracer.trace(wanted[0]))
    line("trace one record", first)
    many = timed(lambda: [tracer.trace(row) for row in wanted])
    assert all(trace.found for trace in many[2])
    line(f"trace {len(wanted)} records", many, f"{many[0] / len(wanted) * 1000:.1f} ms each")
    absent = timed(lambda: tracer.trace({"instruction": "never asked", "answer": "never answered"}))
    assert not absent[2].found
    line("trace an unknown record", absent)
    text = wanted[-1]["answer"][:60]
    matches = timed(lambda: trace_matches(Tracer(database, store, "default"), text, 10))
    assert matches[2].records == 1
    line("match a text, all hashes verified", matches, f"{size / 1e6 / matches[1]:,.0f} MB per cpu-second")
    floor = timed(lambda: subprocess.run(["grep", "-cF", text, raw], check=True, capture_output=True, env={"LC_ALL": "C"}))
    line("floor: grep -F over the same lines", floor, f"{size / 1e6 / floor[1]:,.0f} MB per cpu-second")
    print(f"{'peak memory of this process':<44}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:>9.0f} MB")
    database.close()


def line(what: str, measured: tuple[float, float, Any], more: str = "") -> None:
    print(f"{what:<44}{measured[0]:>9.3f} s   {measured[1]:>8.3f} cpu-s   {more}", flush=True)


if __name__ == "__main__":
    main()
