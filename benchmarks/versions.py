"""What a version costs that changes 1 % of a large corpus: bytes stored more, processor time, memory.

Makes a version of generated records, one with 1 % of them replaced in one place, and one with another 1 % replaced in ten.
Each is made by a process of its own, on SQLite and a folder. Raw files and canonical records are stored both, so the first
takes about twice the corpus: have three times its size free.

Usage: `python -m benchmarks.versions [--gigabytes 10] [--folder FOLDER]`.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from recipes.schema import StoreAddress
from recipes.store import Store
from resources.ingest.create import create_version
from resources.metadata.database import Database

ALL = "s3://hanzo-ml/datasets"
BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
BLOCK = 1000
"""Records that are replaced together: 1 MB."""
PLACES = 10
SENTENCES = 20
"""Of a record."""
SYLLABLES = ("ba", "ke", "li", "mo", "tu", "sa"), "nrstlm", ("an", "ed", "ing", "o", "us")
WORDS = [first + letter + last for first in SYLLABLES[0] for letter in SYLLABLES[1] for last in SYLLABLES[2]]


def write_corpus(path: Path, blocks: int, replaced: Mapping[int, int]) -> None:
    """JSON lines of about 1,000 bytes as people write them; `replaced` gives some blocks another edition of their text."""
    draw = random.Random(0)
    # Many of them: where the same 32 bytes come again and again, hardly any place says "cut here" (`recipes.chunking`).
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
    """The versions that are made, one after the other, and which blocks of each are others than the first one's."""
    part = max(1, blocks // 100)
    one = dict.fromkeys(range(blocks // 2, blocks // 2 + part), 1)
    each = max(1, part // PLACES)
    starts = (blocks * place // PLACES + blocks // (3 * PLACES) for place in range(PLACES))
    ten = {number: 2 for start in starts for number in range(start, start + each)}
    return {"a corpus": {}, "1 % in one place": one, f"1 % in {PLACES} places": {**one, **ten}}


def store_in(folder: Path) -> Store:
    return Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))


def ingest(folder: Path) -> None:
    """In a process of its own: make a version of the corpus and print its peak memory in MB."""
    database = Database(f"sqlite:///{folder}/metadata.db")
    database.migrate()
    create_version(
        database, store_in(folder), name="corpus", path=folder / "corpus.jsonl", user="bench", organization="default"
    )
    database.close()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)


def measure(folder: Path, blocks: int) -> None:
    corpus, before = folder / "corpus.jsonl", 0
    columns = ("corpus MB", "stored more", "of before", "cpu-s", "seconds", "MB/cpu-s", "peak MB")
    print(" " * 20, *(f"{column:>12}" for column in columns))
    for name, replaced in editions(blocks).items():
        write_corpus(corpus, blocks, replaced)
        began = os.times()
        command = [sys.executable, "-m", "benchmarks.versions", "--ingest", str(folder)]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
        ended = os.times()
        cpu = ended.children_user + ended.children_system - began.children_user - began.children_system
        after = sum(entry.size for entry in store_in(folder).entries(ALL))
        size = corpus.stat().st_size
        share = f"{(after - before) / before:.2%}" if before else "-"
        figures = (f"{size / 1e6:,.0f}", f"{(after - before) / 1e6:,.1f}", share, f"{cpu:.0f}")
        speed = (f"{ended.elapsed - began.elapsed:.0f}", f"{size / 1e6 / cpu:.0f}", said.stdout.strip())
        print(f"{name:<20}", *(f"{figure:>12}" for figure in (*figures, *speed)), flush=True)
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--folder", type=Path, help="where the files are made, and removed again")
    parser.add_argument("--ingest", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ingest is not None:
        ingest(options.ingest)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(Path(folder), max(100, round(options.gigabytes * 1000)))


if __name__ == "__main__":
    main()
