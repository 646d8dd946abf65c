"""A misspelled key is reported with the intended one, at any depth of a document."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.validation_errors import explain_unknown_key, list_known_keys, suggest_spelling


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Wing(Strict):
    colour: str = ""


class Bird(Strict):
    wings: tuple[Wing, ...] = ()
    by_name: dict[str, Wing | int] = {}
    left: Wing | None = None


MISSPELLED: list[dict[str, Any]] = [
    {"wing": []},
    {"wings": [{}, {"color": "red"}]},
    {"by_name": {"big": {"color": "red"}}},
    {"left": {"color": "red"}},
]


MEANT = ("wings", "colour", "colour", "colour")


@pytest.mark.parametrize(("document", "meant"), list(zip(MISSPELLED, MEANT, strict=True)))
def test_misspelled_nested_key_is_suggested(document: dict[str, Any], meant: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Bird.model_validate(document)
    problem = refused.value.errors()[0]
    assert problem["type"] == "extra_forbidden"
    assert suggest_spelling(str(problem["loc"][-1]), list_known_keys(Bird, problem["loc"][:-1])) == meant


def test_unknown_key_without_a_similar_one_has_no_suggestion() -> None:
    assert (
        explain_unknown_key("zebra", list_known_keys(Bird, ())) == "unknown key 'zebra': remove it or correct its spelling"
    )


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"lora_rnk": 8}, "unknown key 'lora_rnk': did you mean 'lora_rank'?"),
        ({"distributed": {"stratgy": "ddp"}}, "unknown key 'distributed.stratgy': did you mean 'strategy'?"),
        ({"checkpoint": {"keeplast": 2}}, "unknown key 'checkpoint.keeplast': did you mean 'keep_last'?"),
    ],
)
def test_misspelled_job_parameter_is_refused_with_a_suggestion(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfiguration) as refused:
        Recipe.named("smollm2-135m-lora").changed(parameters)
    assert str(refused.value) == f"job parameters: {said}"


def test_conflict_message_contains_no_pydantic_wording() -> None:
    with pytest.raises(BadConfiguration) as refused:
        Recipe.named("smollm2-135m-full").changed({"lora_rank": 8})
    assert "Value error" not in str(refused.value) and "the document" not in str(refused.value)
    assert "lora_rank" in str(refused.value)
