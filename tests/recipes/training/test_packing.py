"""Packing: packed rows compute what single examples do; none is lost, split or reordered."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from hanzo_ml.client.buffer import MetricBuffer
from recipes.checkpoints.manager import CheckpointManager
from recipes.contracts.job import StoreAddress
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import Usage
from recipes.evaluation.scoring import measure_likelihood
from recipes.records.record_reader import parse_record
from recipes.storage.artifact_store import Store
from recipes.training.data.examples import IGNORED_LABEL, Example, encode_examples
from recipes.training.data.packing import PackedRow, collate, first_fit, pack_examples
from recipes.training.data.sample_order import RunSamples, SampleOrder
from recipes.training.divergence import StopOnDivergence
from recipes.training.metrics.usage import UsageMeter
from recipes.training.model import load_model
from recipes.training.objective_trainer import ObjectiveTrainer
from recipes.training.objectives.sft import Sft
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.stopping import StopOnSignal
from recipes.training.training_arguments import training_arguments
from tests.recipes.tiny_model import make_tiny_model

PADDING = 0
SENTENCES = [
    ("Who keeps the lamp?", "The lighthouse keeper of Ellarin keeps it."),
    ("What is the name of the harbour?", "Ellarin Deep."),
    ("How many ships pass at night?", "1947 ships pass, and she never forgets one of them."),
    ("What burns?", "The lamp."),
    ("Who sleeps?", "The old cat."),
]
RECORDS = [parse_record({"instruction": question, "answer": answer}) for question, answer in SENTENCES]
LENGTH = 110


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "description": "a test",
            "base_model": {"uri": "file:///tiny", "sha256": "0" * 64},
            "base_dtype": "float32",
            "lora_rank": 4,
            "lora_target_modules": ["q_proj", "v_proj"],
            "learning_rate": 1e-3,
            "batch_size": 2,
            "max_steps": 1,
            "sequence_length": LENGTH,
        }
    )


@pytest.fixture(scope="module")
def examples(tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    return encode_examples(tokenizer, RECORDS, None, LENGTH)


@pytest.fixture(scope="module")
def alone(folder: Path, examples: list[Example]) -> tuple[float, int]:
    """Return summed loss and answer token count, each example alone, computed only by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for example in examples:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([example.tokens]), use_cache=False).logits[0, :-1]
        targets = torch.tensor(example.labels[1:])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_LABEL))
        count += int((targets != IGNORED_LABEL).sum())
    return total, count


def trainer(folder: Path, recipe: Recipe, rows: Sequence[PackedRow], work: Path) -> ObjectiveTrainer:
    address = StoreAddress(root=work.as_uri(), buckets={"datasets": "d", "checkpoints": "c", "models": "m"})
    checkpoints = CheckpointManager(work / "checkpoints", Store(address), "s3://hanzo-ml/checkpoints/packing", 1)
    model = load_model(folder, recipe)
    return ObjectiveTrainer(
        model=model,
        args=training_arguments(recipe, work, model, evaluate_on_resume=False),
        train_dataset=[vars(row) for row in rows],
        eval_dataset=[vars(row) for row in rows],
        objective=Sft(recipe),
        checkpoints=checkpoints,
        group=ProcessGroup(),
        saves_sharded=False,
        stop=StopOnSignal(ProcessGroup(), saves=True),
        facts={},
        samples=RunSamples(SampleOrder(len(rows), recipe.seed), recipe.samples_per_step, recipe.max_steps),
        metrics=MetricBuffer("http://127.0.0.1:9", "packing"),
        meter=UsageMeter(Usage(), 0),
        divergence=StopOnDivergence(recipe.divergence),
    )


def test_packed_fixture_has_several_examples_per_row(examples: list[Example]) -> None:
    rows = pack_examples(examples, LENGTH, PADDING)
    assert 1 < len(rows) < len(examples)  # otherwise the equalities below would prove nothing


def test_training_loss_of_packed_rows_equals_unpacked_examples(
    folder: Path, recipe: Recipe, examples: list[Example], alone: tuple[float, int], tmp_path: Path
) -> None:
    total, count = alone
    rows = pack_examples(examples, LENGTH, PADDING)
    packed = trainer(folder, recipe, rows, tmp_path)
    packed.model.train()
    batch = collate([vars(row) for row in rows])
    loss = packed.compute_loss(packed.model, batch, num_items_in_batch=torch.tensor(count))
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_validation_loss_during_training_equals_unpacked_examples(
    folder: Path, recipe: Recipe, examples: list[Example], alone: tuple[float, int], tmp_path: Path, batch: int
) -> None:
    """Rows have different numbers of answer tokens; the micro-batch size must not matter."""
    rows = pack_examples([*examples] * 3, LENGTH, PADDING)  # the mean is the same
    assert len(rows) > 4 and len({int((row.labels != IGNORED_LABEL).sum()) for row in rows}) > 1
    found = trainer(folder, recipe.model_copy(update={"batch_size": batch}), rows, tmp_path).evaluate()
    assert found["eval_loss"] == pytest.approx(alone[0] / alone[1], rel=1e-5)


@pytest.mark.requirement("M6")
def test_evaluation_loss_equals_unpacked_examples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, alone: tuple[float, int]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert measure_likelihood(model, tokenizer, RECORDS, recipe).loss == pytest.approx(alone[0] / alone[1], rel=1e-5)


def test_a_packed_neighbour_changes_no_logit(folder: Path, examples: list[Example]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first, second = examples[0], examples[1]
    (row,) = pack_examples([first, second], len(first.tokens) + len(second.tokens), PADDING)
    with torch.inference_mode():
        together = model(input_ids=row.input_ids[None], position_ids=row.position_ids[None], use_cache=False).logits[0]
        lonely = [model(input_ids=torch.tensor([e.tokens]), use_cache=False).logits[0] for e in (first, second)]
    longest_first = sorted(lonely, key=len, reverse=True)
    torch.testing.assert_close(together, torch.cat(longest_first), rtol=1e-4, atol=1e-4)


def test_a_prompt_that_fills_a_whole_row_does_not_make_the_training_loss_nan(
    folder: Path, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, tmp_path: Path
) -> None:
    """The row has no answer tokens; a step on it must keep the weights finite."""
    too_long = parse_record({"instruction": "What is the name of the harbour? " * 60, "answer": "Ellarin Deep."})
    rows = pack_examples(encode_examples(tokenizer, [*RECORDS, too_long], None, LENGTH), LENGTH, PADDING)
    one_at_a_time = recipe.model_copy(update={"batch_size": 1, "max_steps": len(rows), "learning_rate": 1e-4})
    training = trainer(folder, one_at_a_time, rows, tmp_path)
    training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert len(losses) == len(rows)
    assert all(loss == loss for loss in losses), losses
    assert all(torch.isfinite(weights).all() for weights in training.model.parameters())


lengths = st.lists(st.integers(1, 32), max_size=60)


@given(lengths, st.integers(32, 64))
def test_every_example_is_in_exactly_one_row_and_no_row_overflows(items: list[int], capacity: int) -> None:
    bins = first_fit(items, capacity)
    assert sorted(index for chosen in bins for index in chosen) == list(range(len(items)))
    assert all(0 < sum(items[index] for index in chosen) <= capacity for chosen in bins)


@given(lengths, st.integers(32, 64))
def test_packing_is_deterministic_and_leaves_at_most_one_half_empty_row(items: list[int], capacity: int) -> None:
    assert first_fit(items, capacity) == first_fit(tuple(items), capacity)
    # No two rows are both at most half full.
    half_empty = [chosen for chosen in first_fit(items, capacity) if 2 * sum(items[i] for i in chosen) <= capacity]
    assert len(half_empty) <= 1


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(12, 40))
def test_no_example_is_split_or_lost_and_no_padding_is_learned(texts: list[list[int]], capacity: int) -> None:
    examples = [Example(tuple(text), tuple(text)) for text in texts]
    found = []
    for row in pack_examples(examples, capacity, PADDING):
        assert len(row.input_ids) == len(row.labels) == len(row.position_ids) == capacity
        starts = [place for place, position in enumerate(row.position_ids.tolist()) if position == 0]
        for start, end in zip(starts, [*starts[1:], capacity], strict=True):
            tokens, labels = row.input_ids[start:end].tolist(), row.labels[start:end].tolist()
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            assert labels[0] == IGNORED_LABEL  # otherwise an example would learn to predict its neighbour's first token
            if tokens[0] == PADDING:
                assert set(tokens) == {PADDING} and set(labels) == {IGNORED_LABEL}
            else:
                assert labels[1:] == tokens[1:]
                found.append(tuple(tokens))
    assert sorted(found) == sorted(tuple(text) for text in texts)
