"""Report this process's progress from a thread, so that the launcher detects hung gangs."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recipes.launch.rank_progress import RankProgress, progress_file

REPORT_SECONDS = 2.0


class ProgressReporter(TrainerCallback):  # type: ignore[misc]
    """Write a progress file for this rank while it trains.

    A hung process stops counting, and its peers' counts stop at the next collective. Outside training, while a base model
    is downloaded or weights are published, there is no file, and the launcher does not check progress.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = progress_file(folder, rank)
        self._events = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="progress reporter", daemon=True)

    def on_train_begin(self, *arguments: object, **kwargs: object) -> None:
        self._thread.start()

    def on_train_end(self, *arguments: object, **kwargs: object) -> None:
        self._ended.set()
        self._thread.join()

    def _count(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._events += 1

    on_step_begin = on_substep_end = on_step_end = on_prediction_step = on_evaluate = on_save = _count

    def _report(self) -> None:
        scratch = self._file.with_suffix(f".{os.getpid()}")
        while True:  # the first report is written at once: a rank that hangs before it could not be named
            progress = RankProgress(events=self._events, collectives=count_collectives())
            try:
                scratch.write_text(progress.model_dump_json(exclude={"silent_seconds"}), encoding="utf-8")
                os.replace(scratch, self._file)
            except OSError:  # disk full: the training reports it itself
                scratch.unlink(missing_ok=True)
            if self._ended.wait(REPORT_SECONDS):
                break
        self._file.unlink(missing_ok=True)


def count_collectives() -> Mapping[str, int]:
    """Return how many collectives this process has started, by process group."""
    if not dist.is_initialized():
        return {}
    groups: Any = dist.distributed_c10d._world.pg_map  # the numbers that PyTorch's flight recorder compares between ranks
    return {group.group_name: group._get_sequence_number_for_group() for group in list(groups)}
