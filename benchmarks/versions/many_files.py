"""Measure operations on a version of many files: time, memory, and database statements.

Ten terabytes in files of 100 MB are 100,000 files. Their content is read at disk speed; metadata per file must not grow
faster than their number. Files are therefore small here, of two records: the figures are costs per file.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sqlalchemy import event

from api.routes.v1.dataset_download import file_json, listing, source_artifact
from api.schemas.v1.datasets import versions_json
from recipes.contracts.job import Job, Program, StoreAddress
from recipes.preparation.plan import cut_ranges
from recipes.preparation.source import Source
from recipes.preparation.split_assignment import SPLITS
from recipes.records.record_reader import iterate_record_lines
from recipes.split import split_dataset
from recipes.storage.artifact_store import Store
from resources.datasets.deletion import delete_version
from resources.datasets.diff import diff_versions
from resources.ingest.version_creation import create_version
from resources.lineage.dataset_lineage import read_lineage
from resources.lineage.trace import Tracer
from resources.metadata.database import Database
from resources.metadata.datasets import Datasets, DatasetVersion

BUCKETS = {kind: f"hanzo-{kind}" for kind in ("datasets", "checkpoints", "models")}
NAME, OWNER = "corpus", "default"
IN_A_FOLDER = 1000
RECORDS = 2
CHANGED = 100
"""One in this many files differs in the second version."""


@dataclass(frozen=True)
class Place:
    """Folder, database and store of one number of files."""

    folder: Path
    database: Database
    store: Store

    def version(self, number: int) -> DatasetVersion:
        return Datasets(self.database).read(f"{NAME}@{number}", OWNER)


def record(number: int, edition: int) -> dict[str, str]:
    said = f"{number} of {edition} is said in no other record, {number * 7919 % 10007} times over"
    return {"prompt": f"What is {said}?", "completion": said}


def write_files(folder: Path, numbers: Sequence[int], edition: int) -> None:
    for number in numbers:
        path = folder / f"{number // IN_A_FOLDER:05}" / f"{number:08}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record(number * RECORDS + each, edition)) + "\n" for each in range(RECORDS)))


def create(place: Place) -> None:
    create_version(place.database, place.store, name=NAME, path=place.folder / "files", user="bench", organization=OWNER)


def metadata(place: Place) -> None:
    found, _ = Datasets(place.database).page(OWNER)
    versions_json(place.database, found)
    with place.database.read() as connection:
        read_lineage(connection, found[0])


def preview(place: Place) -> None:
    list(islice(iterate_record_lines(place.store, place.version(1).artifact), 10))


def addresses(place: Place) -> None:
    """List the files' addresses, the first step of `checkout`."""
    source = source_artifact(place.database, place.version(1))
    listing({"url": None}, (file_json(source, file, lambda uri, _: uri) for file in place.store.manifest(source).files))


def checkout(place: Place) -> None:
    place.store.fetch(source_artifact(place.database, place.version(1)), place.folder / "cache")


def compare(place: Place) -> None:
    diff_versions(place.store, place.version(1), place.version(2))


def split(place: Place) -> None:
    version = place.version(1)
    job = Job(
        id="split",
        program=Program.SPLIT,
        inputs={"dataset": version.artifact},
        outputs={name: f"{version.storage_path}splits/bench/{name}" for name in SPLITS},
        result_uri=f"{version.storage_path}splits/bench/result.json",
        store=place.store.address,
        work_dir=str(place.folder / "work"),
        cache_dir=str(place.folder / "cache"),
    )
    split_dataset(job, place.store, place.folder / "work")


def plan(place: Place) -> None:
    """Plan ranges, as each pod of a preparation does before reading."""
    source = Source(place.store, place.version(1).artifact, place.folder / "cache")
    cut_ranges(source.files.values())


def trace(place: Place) -> None:
    Tracer(place.database, place.store, OWNER).trace(record(3, 0))


def delete(place: Place) -> None:
    delete_version(place.database, place.store, place.version(1).id, "bench")


PARTS: Mapping[str, Callable[[Place], None]] = {
    "create": create,
    "change 1 %": create,
    "metadata": metadata,
    "preview": preview,
    "addresses": addresses,
    "checkout": checkout,
    "diff": compare,
    "split": split,
    "plan": plan,
    "trace": trace,
    "delete": delete,
}


def run(part: str, folder: Path) -> None:
    """Run one operation and print seconds, additional memory in MB, and statements.

    Called in a separate process.
    """
    store = Store(StoreAddress(root=(folder / "objects").as_uri(), buckets=BUCKETS))
    database = Database(f"sqlite:///{folder}/metadata.db")
    database.migrate()
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    PARTS[part](Place(folder, database, store))
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    database.close()
    print(took, (after - before) / 1024, len(statements))


def measure(counts: Sequence[int], parent: Path | None) -> None:
    print(f"{'':<12}{'files':>10}{'seconds':>12}{'us a file':>12}{'MB more':>12}{'statements':>12}")
    for count in counts:
        with tempfile.TemporaryDirectory(dir=parent) as name:
            folder = Path(name)
            write_files(folder / "files", range(count), 0)
            for part in PARTS:
                if part == "change 1 %":
                    write_files(folder / "files", range(0, count, CHANGED), 1)
                command = [sys.executable, "-m", "benchmarks.versions.many_files", part, str(folder)]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-3:]
                seconds, more, statements = float(said[0]), float(said[1]), int(said[2])
                figures = (
                    f"{count:,}",
                    f"{seconds:.2f}",
                    f"{seconds / count * 1e6:,.0f}",
                    f"{more:,.0f}",
                    f"{statements:,}",
                )
                print(f"{part:<12}{figures[0]:>10}", *(f"{figure:>11}" for figure in figures[1:]), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
