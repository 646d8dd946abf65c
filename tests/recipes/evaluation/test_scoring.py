"""Evaluation: records rejected by the chat template are skipped; inputs follow the model's device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.results import EvaluationReport
from recipes.evaluation.scoring import generate_answers, measure_likelihood, measure_preference_accuracy
from recipes.records.record_reader import parse_record
from recipes.training.data.examples import Example
from recipes.training.data.preference_pairs import PreferencePair
from tests.recipes.tiny_model import make_tokenizer
from tests.recipes.tiny_training import LORA, TinyTraining
from tests.support.recipes.record_tokenizer import SYSTEM_WITH_THE_USER


def conversation(number: int, *before: str) -> dict[str, Any]:
    users = [{"role": "user", "content": text} for text in (*before, f"What colour has door {number}?")]
    return {"messages": [*users, {"role": "assistant", "content": f"Door {number} is red."}]}


GOOD = [conversation(number) for number in range(20)]
REFUSED = conversation(99, "Roles that do not alternate:")


class Tuned(TinyTraining):
    """A model whose chat template requires alternating roles, and its adapter."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, GOOD)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = SYSTEM_WITH_THE_USER
        tokenizer.save_pretrained(self.model)
        self.trained = self.untrained(**LORA)

    def report(self, name: str, rows: list[dict[str, Any]]) -> EvaluationReport:
        self.splits["test"] = self.publish(f"{name}/test", rows)
        return EvaluationReport.model_validate(self.evaluate(name, self.trained, **LORA).facts["report"])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return Tuned(tmp_path_factory.mktemp("tuned"))


def test_records_rejected_by_chat_template_are_left_out_and_counted(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in training. Regression: evaluation failed on the first one, after a paid training."""
    found = tuned.report("mixed", [GOOD[0], REFUSED, GOOD[1], GOOD[2], REFUSED])
    assert "2 of 5 test records left out: the first is rejected by the chat template" in capsys.readouterr().out
    assert (found.num_records, found.left_out) == (3, 2)
    assert found.model_copy(update={"left_out": 0}) == tuned.report("good", GOOD[:3])
    assert [sample["instruction"] for sample in found.samples] == [f"What colour has door {number}?" for number in range(3)]


def test_evaluation_without_usable_records_is_refused_with_the_reason(tuned: Tuned) -> None:
    with pytest.raises(BadConfiguration, match="no record of the test split can be used: the first is rejected by the chat"):
        tuned.report("refused", [REFUSED] * 2)


class Computed(Exception):
    """Carries the devices of the model's inputs."""


class Elsewhere:
    """A model on another device, such as a GPU, that computes nothing."""

    device = torch.device("meta")
    generation_config = GenerationConfig()

    def __call__(self, **given: Any) -> Any:
        raise Computed({name: found.device.type for name, found in given.items() if isinstance(found, torch.Tensor)})

    generate = __call__


RECIPE = Recipe.named("smollm2-135m-lora").changed({"sequence_length": 64})
LEARNED = {"input_ids", "position_ids", "logits_to_keep"}
EXAMPLE = Example((1, 2, 3), (-100, 2, 3))
RECORD = parse_record({"instruction": "Who?", "answer": "She."})


@pytest.mark.parametrize(
    ("compute", "inputs"),
    [
        (lambda model: measure_likelihood(model, make_tokenizer(), [RECORD], RECIPE), LEARNED),
        (
            lambda model: measure_preference_accuracy(model, [PreferencePair(EXAMPLE, EXAMPLE)]),
            {"input_ids", "logits_to_keep"},
        ),
        (lambda model: generate_answers(model, make_tokenizer(), [[1, 2], [3]], 4), {"input_ids", "attention_mask"}),
    ],
)
def test_inputs_are_moved_to_the_device_of_the_model(compute: Callable[[Any], Any], inputs: set[str]) -> None:
    with pytest.raises(Computed) as computed:
        compute(Elsewhere())
    assert computed.value.args[0] == dict.fromkeys(inputs, "meta")


@pytest.mark.parametrize("several", [False, True])
def test_generation_stops_at_end_tokens_of_the_model_configuration(tuned: Tuned, several: bool) -> None:
    """As in Gemma, whose tokenizer has another one. Regression: answers ran to the token limit."""
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tuned.model, dtype=torch.float32).eval()
    (whole,) = generate_answers(model, tokenizer, [[5, 6, 7]], 8)
    ids = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=8)[0, 3:].tolist()
    last = ids.index(next(token for token in ids[2:] if token not in ids[:2]))
    model.generation_config.eos_token_id = [tokenizer.unk_token_id, ids[last]] if several else ids[last]
    (answer,) = generate_answers(model, tokenizer, [[5, 6, 7]], 8)
    assert answer == tokenizer.decode(ids[: last + 1], skip_special_tokens=True).strip() != whole
