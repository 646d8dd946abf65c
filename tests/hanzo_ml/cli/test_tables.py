"""Tables on a terminal of eighty columns."""

import json

import pytest

from hanzo_ml.cli.output import print_json, print_table

ID = "389f62b8321f4e2b9ea5700d3d769cea"
NAMES = ("trial", "run", "status", "eval/loss", "step", "learning_rate", "lora_dropout", "weight_decay", "warmup_ratio")
ROW = (1, ID, "completed", "2.9586", 12, "0.0048708", "0.10658", "0.028384", "0.08759")


def test_table_wider_than_the_terminal_is_printed_vertically(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(NAMES, [ROW], "no trial")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "trial 1" and f"  run            {ID}" in said and "  learning_rate  0.0048708" in said
    assert max(map(len, said)) <= 80


def test_table_that_fits_is_printed_as_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    print_table(NAMES, [ROW], "no trial")
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == list(NAMES) and row.split() == [str(cell) for cell in ROW]


def test_heading_words_are_not_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`hpo list` and `recipe list` printed `experi ment`, `objecti ve` and `hardwar e`.

    The columns next to them had room to spare.
    """
    monkeypatch.setenv("COLUMNS", "80")
    sweep = (ID, "ellarin-assistant", "bayesian", "completed", "2026-11-26 17:48", "")
    recipe = (
        "zen-72b-full",
        "full",
        "sft",
        "zenlm/zen-72b",
        "32 x nvidia-a100-80gb",
        "58.0 GiB of 79.2 GiB",
        "7 days",
        "yes",
    )
    names = ("recipe", "method", "objective", "base model", "hardware", "memory", "seed estimate", "trains here")
    for columns, row in ((("sweep", "experiment", "strategy", "status", "started", "reason"), sweep), (names, recipe)):
        print_table(columns, [row], "nothing")
        said = capsys.readouterr().out
        assert {word for name in columns for word in name.split()} <= set(said.split()), said
        assert max(map(len, said.splitlines())) <= 80


def test_json_output_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """U+009B starts a sequence as escape and a bracket do."""
    document = {"name": "ü\x1b[2J\x9b2J\x7f"}
    print_json(document)
    said = capsys.readouterr().out
    assert json.loads(said) == document and "ü" in said and not any(ord(each) in (0x1B, 0x7F, 0x9B) for each in said)
