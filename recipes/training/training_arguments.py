"""Build transformers' TrainingArguments from a recipe."""

from math import ceil
from pathlib import Path

import torch
from transformers import TrainingArguments

from recipes.contracts.recipe import Recipe
from recipes.planning.parallel_layout import trains_shards
from recipes.training.optimizer import LR_SCHEDULES, OPTIMIZERS
from recipes.training.parallel import zero


def training_arguments(recipe: Recipe, work: Path, model: torch.nn.Module, *, evaluate_on_resume: bool) -> TrainingArguments:
    """Translate a recipe to transformers' arguments.

    Args:
        work: the run's working directory.
        model: needed for DeepSpeed's configuration.
        evaluate_on_resume: the checkpoint resumed from still lacks its evaluation.
    """
    # the stages of a pipeline take all of a step's micro-batches at once
    micro_batches_per_call = recipe.gradient_accumulation if recipe.stages > 1 else 1
    hf_arguments = TrainingArguments(
        output_dir=str(work / "trainer"),
        max_steps=recipe.max_steps,
        per_device_train_batch_size=recipe.batch_size * micro_batches_per_call,
        per_device_eval_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation // micro_batches_per_call,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=LR_SCHEDULES[recipe.lr_scheduler],
        # computed by transformers from a ratio, 0.29 of 100 steps gave 28
        warmup_steps=ceil(recipe.warmup_ratio * recipe.max_steps),
        weight_decay=recipe.weight_decay,
        optim=OPTIMIZERS[recipe.optimizer],
        activation_checkpointing=recipe.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
        max_grad_norm=recipe.max_grad_norm,
        eval_strategy="steps" if recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps,
        eval_on_start=evaluate_on_resume,
        prediction_loss_only=True,
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would log the last finite loss in place of a NaN
        save_strategy="no",  # `SaveOnSchedule` requests checkpoints
        seed=recipe.seed,
        data_seed=recipe.seed,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,  # all are used; searching for unused ones costs a copy of the logits
        ddp_broadcast_buffers=False,  # buffers never change; DDP would broadcast them before each step
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
        # Without it FSDP2 holds unsharded gradients in every process until the last micro-batch (72B: 144 GB and more).
        accelerator_config={
            "gradient_accumulation_kwargs": {"sync_each_batch": trains_shards(recipe)},
            "non_blocking": torch.cuda.is_available(),  # rows are in pinned memory, so that copies are asynchronous
        },
        **zero.deepspeed_arguments(recipe, model),
    )
    # One GPU per process: with several visible GPUs transformers would use DataParallel and multiply the batch.
    hf_arguments._n_gpu = min(hf_arguments.n_gpu, 1)
    return hf_arguments
