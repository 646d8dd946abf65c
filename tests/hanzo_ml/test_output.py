"""Rows as people see them on a terminal of eighty columns."""

import pytest

from hanzo_ml.cli.output import table

ID = "389f62b8321f4e2b9ea5700d3d769cea"
NAMES = ("trial", "run", "status", "eval/loss", "step", "learning_rate", "lora_dropout", "weight_decay", "warmup_ratio")
ROW = (1, ID, "completed", "2.9586", 12, "0.0048708", "0.10658", "0.028384", "0.08759")


def test_more_columns_than_a_terminal_has_room_for_stand_below_one_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table(NAMES, [ROW], "no trial")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "trial 1" and f"  run            {ID}" in said and "  learning_rate  0.0048708" in said
    assert max(map(len, said)) <= 80


def test_columns_that_fit_stay_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    table(NAMES, [ROW], "no trial")
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == list(NAMES) and row.split() == [str(cell) for cell in ROW]
