"""Parts of a checkpoint, written by several nodes."""

from collections.abc import Sequence
from pathlib import Path

from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PART_KEY, CheckpointPart
from recipes.checkpoints.retention import VALIDATION_LOSS_KEY

URI = "s3://hanzo-ml/checkpoints/run-1"


def write(
    checkpoints: CheckpointManager, step: int, part: CheckpointPart, loss: float | None = None, *, defer_upload: bool = False
) -> None:
    facts = {PART_KEY: part.model_dump(mode="json"), "samples_seen": step * 8} | (
        {VALIDATION_LOSS_KEY: loss} if loss else {}
    )
    with checkpoints.save(step, facts, defer_upload=defer_upload) as folder:
        (folder / f"rows-{part.number}").write_text(f"{part.number} of {step}, {part.save}\n" * 50)
        if part.number == 1:
            (folder / "schedule").write_text(str(step))


def save(together: Sequence[CheckpointManager], step: int, save: str = "", loss: float | None = None) -> None:
    for number, checkpoints in enumerate(together, 1):
        write(checkpoints, step, CheckpointPart(number=number, of=len(together), save=save or f"save-{step}"), loss)
        checkpoints.wait()


def rows_in(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text().partition("\n")[0] for file in folder.iterdir() if file.name.startswith("rows")}


def of(step: int, machines: int = 2, save: str = "") -> dict[str, str]:
    return {f"rows-{number}": f"{number} of {step}, {save or f'save-{step}'}" for number in range(1, machines + 1)}
