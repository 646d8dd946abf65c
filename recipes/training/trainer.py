"""Hugging Face's Trainer with atomic, hashed, resumable checkpoints."""

import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
from peft import PeftModel
from pydantic import JsonValue
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, set_seed

from hanzo_ml.client.buffer import MetricBuffer
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.node_parts import PART_KEY, CheckpointPart
from recipes.checkpoints.retention import DOUBTED_SINCE_KEY, VALIDATION_LOSS_KEY, rank_by_loss
from recipes.training.checkpointing.save_schedule import RaiseWriteErrors, validation_losses
from recipes.training.checkpointing.staging import Staging
from recipes.training.checkpointing.state_files import (
    JSON_SUFFIX,
    SAFETENSORS_SUFFIX,
    find_state_file,
    read_state,
    write_state,
)
from recipes.training.data.sample_order import SAMPLES_SEEN, ProcessSampler, RunSamples
from recipes.training.determinism import RandomStates, wrap_seed
from recipes.training.divergence import StopOnDivergence
from recipes.training.metrics.tracking import write_pending_metrics
from recipes.training.metrics.usage import UsageMeter, peak_memory_bytes
from recipes.training.optimizer import restore_paged_moments
from recipes.training.parallel import fsdp, zero
from recipes.training.parallel.ddp_buckets import fix_bucket_order
from recipes.training.parallel.process_group import ProcessGroup

SCHEDULER_STEM, RNG_STEM = "scheduler", "rng_state"
"""File names in a checkpoint, without the suffix, which has changed between releases."""
TRAINING_ARGS_FILE = "training_args.json"

ELAPSED_SECONDS = "elapsed_seconds"
"""Manifest fact of a checkpoint: training time over all restarts. Excluded from digests."""


class CheckpointingTrainer(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer with atomic, hashed checkpoints and a data position counted in samples.

    transformers writes straight into the final folder, so a kill leaves half a checkpoint that it later takes for the
    latest. This class writes into a temporary folder and renames it once it is complete.
    """

    def __init__(
        self,
        *args: object,
        checkpoints: CheckpointManager,
        facts: Mapping[str, JsonValue],
        samples: RunSamples,
        metrics: MetricBuffer | None,
        meter: UsageMeter,
        divergence: StopOnDivergence,
        group: ProcessGroup,
        saves_sharded: bool,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.saves_sharded = saves_sharded
        self.checkpoints = checkpoints
        self.facts = facts
        self.samples = samples
        self.metrics = metrics
        self.meter = meter
        self.divergence = divergence
        self.every_rank_saves = saves_sharded or self.is_deepspeed_enabled  # otherwise the leader saves everything
        self.staging = Staging(group.local_size if self.every_rank_saves else 1, any_process=group.any)
        self.add_callback(RaiseWriteErrors(self.staging, checkpoints))
        self._scratch: Path | None = None

    def restore_weights(self, folder: Path) -> None:
        """Load the weights of a checkpoint, replacing those that training ended with."""
        self._load_from_checkpoint(str(folder))

    def _get_train_sampler(self, train_dataset: object = None) -> ProcessSampler:
        batch = self.args.per_device_train_batch_size
        places = batch * self.args.gradient_accumulation_steps * self.group.data_size
        return ProcessSampler(self.samples, places, batch, self.group.model_parallel_size)

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, object]:
        """Drop the tensor-parallel configuration from accelerate's arguments.

        transformers and the sampler implement it, and accelerate 1.15 rejects it on a CPU.
        """
        args: dict[str, object] = super()._build_accelerator_args(**kwargs)
        return {name: value for name, value in args.items() if name != "parallelism_config"}

    def _get_output_dir(self, trial: object) -> str:
        return str(self._scratch) if self._scratch else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        self.meter.record_peaks(self.group.all_gather(peak_memory_bytes()))
        with self.meter.checkpoint():
            self.staging.settle()
            facts = self._collect_facts()
            waits = PART_KEY in facts and self.group.any(self.checkpoints.has_pending_uploads())
            if not self.group.is_leader and not (self.group.local_rank == 0 and PART_KEY in facts):
                self._save_on_other_rank(model, trial)
                return
            message = self._saved_message() if self.group.is_leader else None
            step, begin = self.state.global_step, self.staging.begin
            with self.checkpoints.save(step, facts, message, begin, defer_upload=waits) as folder:
                self._stage_state(folder, model, trial)
                if self.group.is_leader:
                    # Metric points that the tracking server has not acknowledged yet are part of the run's state.
                    write_pending_metrics(self.metrics.pending() if self.metrics else [], folder)

    def _collect_facts(self) -> dict[str, JsonValue]:
        """Collect the manifest facts of the current step.

        With several nodes they are broadcast from the leader, with each node's part added.
        """
        step, losses = self.state.global_step, validation_losses(self.state)
        facts: dict[str, JsonValue] = {
            **self.facts,
            SAMPLES_SEEN: self.samples.count_seen(step),
            **self.samples.position_after(step),
            ELAPSED_SECONDS: round(self.meter.read(self.state).seconds, 3),
        }
        if step in losses:
            facts[VALIDATION_LOSS_KEY] = losses[step]
        if since := self.divergence.doubted_since:
            facts[DOUBTED_SINCE_KEY] = since
        if self.every_rank_saves and self.group.nodes > 1:
            facts, save = self.group.broadcast((facts, secrets.token_hex(8)))
            part = CheckpointPart(number=self.group.node + 1, of=self.group.nodes, save=save)
            facts[PART_KEY] = part.model_dump(mode="json")
        return facts

    def _saved_message(self) -> str:
        step, losses = self.state.global_step, validation_losses(self.state)
        best = rank_by_loss(losses)[:1] == [step]
        return f"checkpoint {step} saved" + (f", the best so far: validation loss {losses[step]:.4f}" if best else "")

    def _save_on_other_rank(self, model: torch.nn.Module, trial: object) -> None:
        """Save the state that only this process holds, through the first process of its node.

        transformers needs a folder to write to, which is removed afterwards.
        """
        self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=".", suffix=".tmp", dir=self.checkpoints.folder))
        self._stage_state(folder, model, trial)
        self.staging.add_action(partial(shutil.rmtree, folder))
        self.staging.begin()

    def _stage_state(self, folder: Path, model: torch.nn.Module, trial: object) -> None:
        """Save all that transformers saves: small files to `folder` now, large tensors through `staging`."""
        inner = folder / f"checkpoint-{self.state.global_step}"
        inner.mkdir()
        self._scratch = folder
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._scratch = None
        self.staging.add_action(partial(move_to_parent, inner))

    def _prepare_for_training(self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None) -> object:
        if not self.is_deepspeed_enabled:
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
            if isinstance(self.model_wrapped, DistributedDataParallel):
                fix_bucket_order(self.model_wrapped)
            return prepared
        # with a path it would search for DeepSpeed's own checkpoint files
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint:
            zero.load_state(self.deepspeed, Path(resume_from_checkpoint))
            self._load_scheduler(Path(resume_from_checkpoint))
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            zero.save_state(self.deepspeed, Path(output_dir), self.group, self.staging)
        elif self.saves_sharded:
            fsdp.save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir), self.group, self.staging)
        elif self.group.is_leader:
            file = Path(output_dir, fsdp.OPTIMIZER_STEM + SAFETENSORS_SUFFIX)
            self.staging.stage(self.optimizer.state_dict(), partial(write_state, file=file))
        if self.group.is_leader:
            write_state(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_STEM + JSON_SUFFIX))
            # Not read by anything: they record how the checkpoint was made.
            Path(output_dir, TRAINING_ARGS_FILE).write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not checkpoint or self.is_deepspeed_enabled:  # DeepSpeed loads them in `_prepare_for_training`
            return
        if self.saves_sharded:
            fsdp.load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
        else:
            # With several processes per machine each would hold a full copy in host memory, so they load it onto their GPUs.
            device = self.args.device if self.args.world_size > 1 and self.args.device.type != "cpu" else "cpu"
            self.optimizer.load_state_dict(read_state(find_state_file(Path(checkpoint), fsdp.OPTIMIZER_STEM), device))
            restore_paged_moments(self.optimizer.optimizer)
        self._load_scheduler(Path(checkpoint))

    def _load_scheduler(self, checkpoint: Path) -> None:
        """Load the schedule and set the learning rate of the next step."""
        state = read_state(find_state_file(checkpoint, SCHEDULER_STEM))
        # one rate for all parameter groups, whose number depends on the number of processes
        for rates in ("base_lrs", "_last_lr"):
            state[rates] = state[rates][:1] * len(self.optimizer.param_groups)
        self.lr_scheduler.load_state_dict(state)
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.saves_sharded and output_dir and not isinstance(self.model, PeftModel):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            fsdp.save_weights(self.model, Path(output_dir), self.group, self.staging)
        elif self.is_deepspeed_enabled and output_dir and not isinstance(self.model, PeftModel):
            Path(output_dir).mkdir(parents=True, exist_ok=True)  # DeepSpeed saves the weights with their moments
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save the leader's full weights, or those gathered for it in `state_dict`, and the tokenizer.

        transformers' method would also write the training arguments, as a pickle.
        """
        if self.group.is_leader:
            weights = trained_weights(self.model) if state_dict is None else state_dict
            self.staging.stage(weights, partial(self._write_model, output_dir or self.args.output_dir))

    def _write_model(self, folder: str, weights: dict[str, torch.Tensor]) -> None:
        self.model.save_pretrained(folder, state_dict=weights)
        self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self.saves_sharded and not isinstance(self.model, PeftModel):
            fsdp.load_weights(self.model, Path(checkpoint))
        elif isinstance(self.model, PeftModel):
            # Through host memory: by default every process would load it onto the first GPU at the same time.
            self.model.load_adapter(checkpoint, self.model.active_adapter, is_trainable=True, torch_device="cpu")
        else:
            super()._load_from_checkpoint(checkpoint, model)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states of all processes, also of other machines, in the leader's folder."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        own = Path(output_dir, self._rng_stem(self.group.rank) + SAFETENSORS_SUFFIX)
        RandomStates.capture().save(own)
        states = self.group.all_gather(own.read_bytes())
        own.unlink()
        for rank, state in enumerate(states if self.group.is_leader else ()):
            Path(output_dir, self._rng_stem(rank) + SAFETENSORS_SUFFIX).write_bytes(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states, or seed new ones if the number of processes has changed."""
        if checkpoint and len(list(Path(checkpoint).glob(f"{RNG_STEM}*"))) != self.group.size:
            rng_seed = self.args.seed + self.state.global_step * self.group.num_random_streams + self.group.random_stream
            set_seed(wrap_seed(rng_seed))
        elif checkpoint:
            RandomStates.load(find_state_file(Path(checkpoint), self._rng_stem(self.group.rank))).restore()

    def _rng_stem(self, rank: int) -> str:
        """Return transformers' name of the file, without the suffix."""
        return f"{RNG_STEM}_{rank}" if self.group.size > 1 else RNG_STEM


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights by name: those of the adapter if there is one."""
    if isinstance(model, PeftModel):
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    return dict(model.state_dict())


def move_to_parent(folder: Path) -> None:
    """Move a folder's contents up into its parent and remove it."""
    for file in folder.iterdir():
        file.rename(folder.parent / file.name)
    folder.rmdir()
