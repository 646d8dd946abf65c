"""Measure a version that changes 1 % of a large corpus, and its splits.

Creates a version of generated records, one with 1 % of them replaced in one place, and one with another 1 % replaced in ten;
each is split as in production. Reports additional storage, processor time and memory. Versions and splits are created by
separate processes, on SQLite and a folder. Both raw files and canonical records are stored, and splitting creates a copy:
four times the corpus must be free.

Usage: `python -m benchmarks.versions [--gigabytes 10] [--folder FOLDER]`, or `python -m benchmarks.versions --files
1000,10000,100000 [--folder FOLDER]` for versions of that many files (`benchmarks.versions.many_files`).
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.versions import many_files
from benchmarks.versions.many_files import BUCKETS
from recipes.contracts.job import Job, Program, StoreAddress
from recipes.preparation.split_assignment import SPLITS
from recipes.split import split_dataset
from recipes.storage.artifact_store import Store
from resources.ingest.version_creation import create_version
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets

ALL = "s3://hanzo-ml/datasets"
BLOCK = 1000
"""Number of records that are replaced together: 1 MB."""
PLACES = 10
SENTENCES = 20
"""Number of sentences of a record."""
SYLLABLES = ("ba", "ke", "li", "mo", "tu", "sa"), "nrstlm", ("an", "ed", "ing", "o", "us")
WORDS = [first + letter + last for first in SYLLABLES[0] for letter in SYLLABLES[1] for last in SYLLABLES[2]]


def write_corpus(path: Path, blocks: int, replaced: Mapping[int, int]) -> None:
    """Write JSON lines of about 1,000 bytes; `replaced` gives some blocks another text."""
    draw = random.Random(0)
    # Many sentences: if the same 32 bytes recur, hardly any position is a chunk boundary (`recipes.storage.chunking`).
    sentences = [" ".join(draw.choices(WORDS, k=8)) for _ in range(200_000)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(blocks):
            edition = replaced.get(number, 0)
            said = random.Random(number * (PLACES + 1) + edition).choices(sentences, k=SENTENCES * BLOCK)
            for record in range(BLOCK):
                first, *rest = said[SENTENCES * record : SENTENCES * (record + 1)]
                row = {"instruction": f"{number}-{record}-{edition}: {first}?", "answer": ". ".join(rest)}
                file.write(json.dumps(row) + "\n")


def editions(blocks: int) -> dict[str, dict[int, int]]:
    """Return the versions in order, and which of their blocks differ from the first version."""
    part = max(1, blocks // 100)
    one = dict.fromkeys(range(blocks // 2, blocks // 2 + part), 1)
    each = max(1, part // PLACES)
    starts = (blocks * place // PLACES + blocks // (3 * PLACES) for place in range(PLACES))
    ten = {number: 2 for start in starts for number in range(start, start + each)}
    return {"a corpus": {}, "1 % in one place": one, f"1 % in {PLACES} places": {**one, **ten}}


def store_in(folder: Path) -> Store:
    return Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))


def ingest(folder: Path) -> None:
    """Create a version of the corpus; runs in a separate process."""
    database = Database(f"sqlite:///{folder}/metadata.db")
    database.migrate()
    create_version(
        database, store_in(folder), name="corpus", path=folder / "corpus.jsonl", user="bench", organization="default"
    )
    database.close()


def split(folder: Path) -> None:
    """Split the newest version; runs in a separate process."""
    database = Database(f"sqlite:///{folder}/metadata.db")
    version = Datasets(database).read("corpus", "default")
    database.close()
    place = f"{version.storage_path}splits/bench"
    job = Job(
        id="split",
        program=Program.SPLIT,
        inputs={"dataset": version.artifact},
        outputs={name: f"{place}/{name}" for name in SPLITS},
        result_uri=f"{place}/result.json",
        store=store_in(folder).address,
        work_dir=str(folder / "work"),
        cache_dir=str(folder / "cache"),
    )
    split_dataset(job, store_in(folder), folder / "work")
    shutil.rmtree(folder / "cache")


PARTS = {"ingest": ingest, "split": split}


def measure(folder: Path, blocks: int) -> None:
    corpus, before = folder / "corpus.jsonl", 0
    columns = ("corpus MB", "stored more", "of before", "cpu-s", "seconds", "MB/cpu-s", "peak MB")
    print(" " * 30, *(f"{column:>12}" for column in columns))
    for name, replaced in editions(blocks).items():
        write_corpus(corpus, blocks, replaced)
        size, first = corpus.stat().st_size, before
        for part in PARTS:
            began = os.times()
            command = [sys.executable, "-m", "benchmarks.versions", f"--{part}", str(folder)]
            said = subprocess.run(command, check=True, capture_output=True, text=True)
            ended = os.times()
            cpu = ended.children_user + ended.children_system - began.children_user - began.children_system
            after = sum(entry.size for entry in store_in(folder).entries(ALL))
            share = f"{(after - before) / first:.2%}" if first else "-"
            figures = (f"{size / 1e6:,.0f}", f"{(after - before) / 1e6:,.1f}", share, f"{cpu:.0f}")
            speed = (f"{ended.elapsed - began.elapsed:.0f}", f"{size / 1e6 / cpu:.0f}", said.stdout.split()[-1])
            print(f"{name + ', ' + part:<30}", *(f"{figure:>12}" for figure in (*figures, *speed)), flush=True)
            before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--files", help="numbers of files, such as 1000,10000, to measure instead of a large corpus")
    parser.add_argument("--folder", type=Path, help="parent of the temporary files")
    for part in PARTS:
        parser.add_argument(f"--{part}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for part, run in PARTS.items():
        if (folder := getattr(options, part)) is not None:
            run(folder)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
            return
    if options.files:
        many_files.measure([int(count) for count in options.files.split(",")], options.folder)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), max(100, round(options.gigabytes * 1000)))


if __name__ == "__main__":
    main()
