"""Training on prepared tokens: the same rows as from records, only for the same tokenizer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.contracts.job import BadConfiguration, Result
from recipes.contracts.parameters import PrepareParameters
from recipes.contracts.recipe import Recipe
from recipes.preparation.tokenization.record_tokenizer import Tokens
from recipes.records.record_reader import parse_record, read_records
from recipes.training.data.examples import encode_examples, tokenize_records
from recipes.training.data.packing import PackedRows, pack_examples
from recipes.training.data.rows import is_prepared, load_packed_rows, load_prepared_rows
from tests.recipes.preparation.preparation_workspace import Place, questions
from tests.recipes.tiny_model import make_tokenizer

LENGTH = 64


def recipe(**changed: Any) -> Recipe:
    return Recipe.named("smollm2-135m-lora").changed({"sequence_length": LENGTH, **changed})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("prepared"), questions(300))


@pytest.fixture(scope="module")
def prepared(place: Place) -> Result:
    return place.prepare({"tokenize": place.tokenize()})


@pytest.fixture(scope="module")
def rows_of(place: Place, prepared: Result) -> Any:
    split = prepared.artifacts["train"]
    folder = place.store.fetch(split, place.folder)

    def rows(wanted: Recipe, tokenizer: Any = None) -> PackedRows:
        return load_prepared_rows(folder, place.store.manifest(split), tokenizer or make_tokenizer(), wanted, padding=0)

    rows.folder = folder  # type: ignore[attr-defined]
    return rows


@pytest.mark.slow
def test_prepared_rows_equal_tokenized_records_bit_for_bit(rows_of: Any) -> None:
    prepared = rows_of(recipe())
    examples = encode_examples(make_tokenizer(), read_records(rows_of.folder), None, LENGTH)
    tokenized = pack_examples(examples, LENGTH, padding=0)
    assert is_prepared(rows_of.folder)
    assert prepared.num_records == len(examples)
    assert len(prepared) == len(tokenized)
    for index, row in enumerate(tokenized):
        assert all(torch.equal(prepared[index][name], tensor) for name, tensor in vars(row).items())


def test_log_reports_truncated_and_skipped_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a preparation that truncated records itself, and for the same records without preparation."""
    place = Place(tmp_path, questions(300))
    result = place.prepare({"tokenize": place.tokenize(max_length=80)})
    said = {}
    for length in (48, 80):
        wanted = recipe(sequence_length=length)
        capsys.readouterr()
        load_packed_rows(result.artifacts["train"], place.store, place.folder, make_tokenizer(), wanted)
        said[length] = capsys.readouterr().out
        encode_examples(
            make_tokenizer(), read_records(place.store.fetch(result.artifacts["train"], place.folder)), None, length
        )
        said[-length] = capsys.readouterr().out
    records = [parse_record(row) for row in place.rows(result)]
    lengths = [len(tokens) for tokens in tokenize_records(make_tokenizer(), records, None) if isinstance(tokens, Tokens)]
    before = sum(length > 80 for length in lengths)
    assert 0 < before == result.facts["truncated"] < len(records)
    for length in (48, 80):
        assert f"{before} records of all splits, cut at tokenize.max_length by the preparation" in said[length]
    assert "sequence_length" not in said[80]
    for problem in ("cut at sequence_length 48: what is said", "left out: a prompt alone fills sequence_length 48"):
        found = re.search(rf"(\d+) records {problem}", said[48])
        alone = re.search(rf"(\d+) of \d+ records {problem}", said[-48])
        assert found and alone and found[1] == alone[1] and int(found[1]) > 0
    assert "cut at sequence_length 80" in said[-80]


def test_another_tokenizer_is_refused(rows_of: Any) -> None:
    other = make_tokenizer()
    other.add_tokens(["lighthouse"])
    with pytest.raises(BadConfiguration, match="prepare it with `tokenizer: recipe:smollm2-135m-lora`"):
        rows_of(recipe(), other)


def test_another_system_prompt_is_refused(rows_of: Any) -> None:
    with pytest.raises(BadConfiguration, match=r"the recipe's is 'Be brief.': they must be the same"):
        rows_of(recipe(system_prompt="Be brief."))


def test_rows_too_short_for_any_answer_are_refused(rows_of: Any) -> None:
    with pytest.raises(BadConfiguration, match="no answer fits into sequence_length 8"):
        rows_of(recipe(sequence_length=8))


def test_split_manifest_records_its_parameters(place: Place, prepared: Result) -> None:
    facts = place.store.manifest(prepared.artifacts["train"]).facts
    parameters = PrepareParameters.model_validate(facts["parameters"])
    assert parameters.tokenize is not None
    assert facts["num_records"] == prepared.metrics["train"]
    assert json.loads(json.dumps(facts)) == facts
