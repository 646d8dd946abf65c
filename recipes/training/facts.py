"""What the program train says of a run that has ended, besides what it published."""

import math

from recipes.contracts.recovery_log import Incidents
from recipes.contracts.results import TrainingFacts
from recipes.training.trainer import CheckpointingTrainer
from recipes.usage import Usage


def facts_of(
    trainer: CheckpointingTrainer,
    usage: Usage,
    incidents: Incidents,
    *,
    resumed_from: int | None,
    published: int,
    unsent: int,
) -> TrainingFacts:
    """`published` is the step whose weights the run left, `unsent` how many points the tracking server did not get."""
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return TrainingFacts(
        train_seconds=round(usage.seconds, 3),
        gpus=usage.gpus,
        gpu_seconds=round(usage.gpu_seconds, 3),
        resumed_from=resumed_from,
        unsent_metrics=unsent,
        losses={step: loss if math.isfinite(loss) else None for step, loss in losses.items()},
        best_step=trainer.checkpoints.best_step(),
        published_step=published,
        incidents=incidents.entries,
        tokens=usage.tokens,
        peak_memory=usage.peak_memory,
        checkpoint_seconds=round(usage.checkpoints, 3),
        longest_checkpoint=round(usage.longest_checkpoint, 3),
        checkpoint_share=round(usage.checkpoint_share, 4),
    )
