"""Record files in every format that ingestion reads."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.resources.dataset_versions import Place

ROWS = [{"text": 'täst, "x"\n2', "n": 1, "score": 0.5, "ok": True}, {"text": "", "n": None, "score": 2.25, "ok": False}]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def packed_zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table)


def write_csv(path: Path) -> None:
    path.write_text('text,n,score,ok\n"täst, ""x""\n2",1,0.5,true\n"",,2.25,false\n', newline="")


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "jsonl": ("jsonl", write_jsonl),
    "parquet": ("parquet", write_parquet),
    "arrow file": ("arrow", write_arrow_file),
    "arrow stream": ("arrow", write_arrow_stream),
    "csv": ("csv", write_csv),
}
