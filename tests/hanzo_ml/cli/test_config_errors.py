"""Server errors about sweep and job files give file and line, as for recipes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resources.hpo.sweep_files import SPECIFIED
from tests.support.cli.command_line import Cli, cli, create, file, refusal

__all__ = ["cli", "file"]  # fixtures

RECORDS = '{"instruction": "1+1", "answer": "2"}\n'
SWEEP = SPECIFIED.lstrip().replace("instruction-v2", "refused")
JOB = "name: mine\ndataset: refused\nrecipe: smollm2-135m-lora\nparameters:\n  max_steps: 3\n  lora_rank: 8\n"


@pytest.fixture
def refused(cli: Cli, file: Callable[..., Path]) -> Callable[..., str]:
    """Return the error for a file in which one line is changed."""
    data = file(RECORDS)

    def said(command: str, text: str, line: str, instead: str, named: str = "") -> str:
        create(cli, data, "refused")
        place = text.splitlines().index(named or line) + 1
        path = file(text.replace(line, instead), "mine.yaml")
        message = refusal(cli(*command.split(), "--config", str(path)))
        assert message.startswith(f"error: {path}, line {place}: "), message
        return message

    return said


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("max_trials: 50", "max_trails: 50", "unknown key 'max_trails': did you mean 'max_trials'?"),
        ("max_trials: 50", "max_trials: 0", "max_trials"),
        ("strategy: bayesian # grid | random | bayesian | pbt", "strategy: grid", "needs `points`"),
        ("max_trials: 50", "pbt: {population: 4}", "pbt is only used by strategy pbt, and this one is bayesian"),
        ("  max_steps: 5000", "  max_stepz: 5000", "unknown key 'max_stepz': did you mean 'max_steps'?"),
        ('  dataset: "refused"', '  dataset: "nobody"', "there is no dataset 'nobody'"),
        ('experiment: "zen-7b-lora-hpo"', 'experiment: "zen/7b"', "Names cannot contain '/' or ':'"),
        ("  patience: 3 # Stop trial if no improvement for 3 evals", "  patience: 0", "early_stopping.patience"),
        ("  min_delta: 0.001", "  min_delta: .nan", "'early_stopping.min_delta' is nan: write a number"),
        ('experiment: "zen-7b-lora-hpo"', "experiment: 2026-11-26", "'experiment' is read by YAML as a date"),
        ('experiment: "zen-7b-lora-hpo"', "experiment: 2026", "it must be a text: put it in quotes"),
        ("  min_delta: 0.001", "  min_detla: 1", "unknown key 'early_stopping.min_detla': did you mean 'min_delta'?"),
    ],
)
def test_sweep_file_error_names_file_and_line(refused: Callable[..., str], line: str, instead: str, words: str) -> None:
    assert words in refused("hpo start", SWEEP, line, instead)


@pytest.mark.parametrize(
    ("named", "line", "instead", "words"),
    [
        ("  learning_rate:", "    min: 1e-6", "    min: 1e-1", "min must be less than max"),
        ("  lora_rank:", "    values: [8, 16, 32, 64, 128]", "    values: [8, many]", "valid integer"),
    ],
)
def test_hyperparameter_error_names_the_line_where_it_begins(
    refused: Callable[..., str], named: str, line: str, instead: str, words: str
) -> None:
    assert words in refused("hpo start", SWEEP, line, instead, named)


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("dataset: refused", "dataset: nobody", "there is no dataset 'nobody': create it with `hanzo-ml dataset create"),
        ("dataset: refused", "dataset: refusd", "there is no dataset 'refusd': did you mean 'refused'?"),
        ("dataset: refused", "dataset: refused@7", "there is no dataset 'refused@7': the newest version is refused@1"),
        ("name: mine", "name: mine/yours", "Invalid model name 'mine/yours'. Names cannot contain '/' or ':'"),
        ("name: mine", "name: ' '", "'name': it is blank: use at least one visible character"),
        ("recipe: smollm2-135m-lora", "recipe: smollm", "unknown recipe 'smollm'"),
        ("  lora_rank: 8", "  lora_rank: 0", "lora_rank"),
        ("  lora_rank: 8", "  sequence_length: 9000", "recipe 'smollm2-135m-lora': sequence_length is 9000, and base"),
        ("  lora_rank: 8", "  lora_rang: 8", "unknown key 'lora_rang': did you mean 'lora_rank'?"),
        ("recipe: smollm2-135m-lora", "recpie: smollm2-135m-lora", "unknown key 'recpie': did you mean 'recipe'?"),
        (
            "recipe: smollm2-135m-lora",
            "max_grad_norm: 3",
            "'max_grad_norm' is a key of the recipe: put it below",
        ),
    ],
)
@pytest.mark.parametrize("command", ["job submit", "job estimate"])
def test_job_file_error_names_file_and_line(
    refused: Callable[..., str], command: str, line: str, instead: str, words: str
) -> None:
    """An estimate gave no line, and accepted any name."""
    assert words in refused(command, JOB, line, instead)


def test_preparation_file_error_names_file_and_line(cli: Cli, file: Callable[..., Path]) -> None:
    create(cli, file(RECORDS), "refused")
    path = file("split: {seed: 7}\nworkers: 0\n", "mine.yaml")
    assert refusal(cli("dataset", "prepare", "refused", "--config", str(path))).startswith(f"error: {path}, line 2: ")


def test_error_in_a_value_set_by_option_names_no_line(cli: Cli, file: Callable[..., Path]) -> None:
    create(cli, file(RECORDS), "refused")
    message = refusal(cli("job", "submit", "--config", str(file(JOB, "mine.yaml")), "--set", "lora_rank=0"))
    assert "lora_rank" in message and "line" not in message


def test_missing_key_error_names_the_file_without_a_line(cli: Cli, file: Callable[..., Path]) -> None:
    path = file(SWEEP.replace('experiment: "zen-7b-lora-hpo"\n', ""), "mine.yaml")
    said = f"error: {path}: 'experiment' is missing or empty: give it a value\n"
    assert cli("hpo", "start", "--config", str(path)).stderr == said


def test_parameters_of_a_command_job_are_refused_with_advice(cli: Cli, file: Callable[..., Path]) -> None:
    path = file("name: mine\ncommand: [python, -V]\nparameters: {max_steps: 3}\n", "mine.yaml")
    message = refusal(cli("job", "submit", "--config", str(path)))
    assert message.startswith(f"error: {path}, line 3: 'parameters' belongs to a recipe: put arguments into")


def test_empty_id_is_refused(cli: Cli) -> None:
    for command in ("job get", "job logs", "hpo results", "run get"):
        assert "id or name is empty" in refusal(cli(*command.split(), ""))
