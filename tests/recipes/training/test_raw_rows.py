"""Training on records: same tokens as tokenizing all at once, without holding them in memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.records.record_reader import read_records
from recipes.training.data.examples import encode_examples
from recipes.training.data.packing import PackedRows, pack_examples
from recipes.training.data.rows import tokenize_rows
from tests.recipes.tiny_model import make_tokenizer

LENGTH = 64
RECORDS: list[dict[str, Any]] = [
    {"instruction": f"Which door is number {number}?", "answer": "The lamp burns. " * (number % 7)}
    for number in range(1, 3000)
    if number % 7
]
TOO_LONG = {"instruction": "Which door?", "answer": "The lamp burns. " * 100}
PROMPTS_ALONE = {"instruction": "Which door? " * 100, "answer": "None."}


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that tokenizes records of two files, ten at a time."""
    monkeypatch.setattr("recipes.training.data.rows.RECORDS_PER_BLOCK", 10)
    folder, scratch = tmp_path / "split", tmp_path / "scratch"
    scratch.mkdir()

    def rows(records: list[dict[str, Any]]) -> PackedRows:
        folder.mkdir(exist_ok=True)
        for name, some in (("a", records[::2]), ("b", records[1::2])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in some))
        recipe = Recipe.named("smollm2-135m-lora").changed({"sequence_length": LENGTH})
        found = tokenize_rows(folder, scratch, make_tokenizer(), recipe, padding=0)
        assert list(scratch.iterdir()) == [], "the file is gone, and what is in it still there"
        return found

    rows.folder = folder  # type: ignore[attr-defined]
    return rows


def test_streamed_rows_equal_rows_of_all_records_bit_for_bit(rows_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of([*RECORDS[:79], PROMPTS_ALONE, TOO_LONG])
    lines = capsys.readouterr().out.splitlines()
    examples = encode_examples(make_tokenizer(), read_records(rows_of.folder), None, LENGTH)
    assert [line.split(" ", 1)[1] for line in lines] == [
        line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()
    ]
    assert len(lines) == 2, "what was cut, and what was left out"
    expected = pack_examples(examples, LENGTH, padding=0)
    assert len(found) == len(expected) > 10 and found.num_records == len(examples) == 80
    for index, row in enumerate(expected):
        assert found[index].keys() == vars(row).keys()
        assert all(torch.equal(found[index][name], tensor) for name, tensor in vars(row).items())


@pytest.mark.requirement("B18")
def test_neither_records_nor_tokens_are_held_in_memory(rows_of: Any) -> None:
    """They used to take 59 bytes per token, in addition to the resulting tensors."""
    rows_of(RECORDS[:80])  # warm up: imports and text caches are not counted
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    found = rows_of(RECORDS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.num_tokens > 100_000
    assert peak + pa.total_allocated_bytes() - before < 20 * found.num_tokens


@pytest.mark.parametrize(
    ("records", "message"), [([], "it has no records"), ([PROMPTS_ALONE], "no answer fits into")], ids=["none", "too-long"]
)
def test_split_with_nothing_to_learn_is_refused(rows_of: Any, records: list[Any], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        rows_of(records)
