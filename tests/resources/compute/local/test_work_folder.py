"""Work folder paths are stable across releases, so upgrades keep pending and running jobs."""

from pathlib import Path

import pytest

from recipes.contracts.job import Program
from resources.compute.base import JobRef
from resources.compute.local.work_folder import work_folder


@pytest.mark.parametrize(
    ("program", "id", "folder"),
    [
        (Program.TRAIN, "run-1", "run-1/train"),
        (Program.TRAIN, "train-1", "train-1/train"),
        (Program.COMMAND, "5e1f", "5e1f/command"),
        (Program.EVALUATE, "evaluate-run-1", "run-1/evaluate"),
        (Program.EVALUATE, "evaluate-evaluate-1", "evaluate-1/evaluate"),
        (Program.CONVERT, "convert-run-1", "run-1/convert"),
        (Program.PREPARE, "5e1f", "5e1f/prepare"),
        (Program.PREPARE, "prepare-7c-0123", "prepare-7c-0123"),
        (Program.SPLIT, "split-7c-0123", "split-7c-0123"),
        (Program.VALIDATE, "validate-7c-0123", "validate-7c-0123"),
        (Program.FIND_LEAKS, "find-leaks-7c-0123", "find-leaks-7c-0123"),
    ],
)
def test_each_program_has_its_own_work_folder(program: Program, id: str, folder: str) -> None:
    assert work_folder(Path("/state/jobs"), JobRef(id, program)) == Path("/state/jobs") / folder
