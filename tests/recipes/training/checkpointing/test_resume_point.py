"""The checkpoint a run resumes from.

The best checkpoint outlives the last few, and a rewind loses none.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from hanzo_ml.client.points import Point, ResumeFilter
from hanzo_ml.client.repeated_steps import UNKNOWN_TIME, RepeatedSteps, last_repeat_time
from recipes import train as program
from recipes.checkpoints.manager import CheckpointManager
from recipes.checkpoints.retention import VALIDATION_LOSS_KEY
from recipes.contracts.job import BadConfiguration, Result, StoreAddress
from recipes.contracts.results import TrainingFacts, read_unsent_metrics, result_folder
from recipes.contracts.rewind import Rewind
from recipes.runner import Restart
from recipes.storage.artifact_store import MANIFEST_FILE, Store
from recipes.storage.base_model_folder import hash_model_folder
from recipes.storage.manifest import Manifest
from recipes.training.checkpointing.resume_point import check_checkpoint_fits, find_resume_checkpoint
from recipes.training.checkpointing.state_files import write_state
from recipes.training.data.sample_order import SAMPLES_SEEN
from recipes.training.trainer import CheckpointingTrainer
from tests.recipes.preparation.preparation_workspace import BUCKETS
from tests.recipes.tiny_model import make_tiny_model
from tests.recipes.training.training_workspace import Place, facts, pending_in, saved


def losses(result: object) -> dict[int, float | None]:
    return TrainingFacts.model_validate(result.facts).losses  # type: ignore[attr-defined]


@pytest.mark.slow
def test_best_checkpoint_is_retained_and_run_can_resume_from_it(place: Place, tmp_path: Path) -> None:
    """The learning rate changes no float32 weight; of equal losses the first is best."""
    work = tmp_path / "back"
    policy = {"interval": "1h", "interval_steps": 1, "keep_last": 2}
    first = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint=policy)
    checkpoints = place.checkpoints(work)
    best = checkpoints.best()
    assert best is not None and best[0] == 5
    assert checkpoints.local_steps() == checkpoints.stored_steps() == [8, 7, best[0]]

    again = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": "best"})
    assert TrainingFacts.model_validate(again.facts).resumed_from == best[0]
    assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest
    assert losses(again) == losses(first)
    assert checkpoints.stored_steps() == [8, 7, best[0]]
    way = checkpoints.branch(f"from-{best[0]}")
    assert way.stored_steps()[0] == 8

    with pytest.raises(BadConfiguration, match=r"there is no valid checkpoint 4. There are: 5, 7, 8"):
        place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": 4})
    # after a kill on the new branch, the run resumes there
    way.discard_from(8)
    after = place.train(work, eval_steps=5, learning_rate=1e-15, checkpoint={**policy, "resume_from": "best"})
    assert TrainingFacts.model_validate(after.facts).resumed_from == 7


@pytest.mark.slow
def test_new_machine_resumes_from_a_compressed_upload(place: Place, tmp_path: Path) -> None:
    work = tmp_path / "compressed"
    policy = {"interval": "1h", "interval_steps": 1, "keep_last": 2, "compression": "zstd"}
    first = place.train(work, checkpoint=policy)
    checkpoints = place.checkpoints(work)
    assert any(uri.endswith("optimizer.safetensors.zst") for uri in place.store.list(f"{checkpoints.uri}/8"))
    checkpoints.discard_from(8)
    shutil.rmtree(work)
    again = place.train(work, checkpoint=policy)
    assert TrainingFacts.model_validate(again.facts).resumed_from == 7
    assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest
    assert losses(again) == losses(first)


def test_checkpoint_of_another_recipe_is_refused_before_loading(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, other = tmp_path / "changed", make_tiny_model(tmp_path / "other", seed=1)
    targets = place.recipe.lora_target_modules
    place.train(work, max_steps=2)
    place.train(work, max_steps=3, lora_target_modules=targets[::-1])
    monkeypatch.delattr(program, "load_model")
    for changed, named in (
        ({"lora_rank": 8, "lora_alpha": 16}, "lora_rank was 4 and is 8, lora_alpha was 32 and is 16"),
        ({"lora_target_modules": ["q_proj"]}, r"lora_target_modules was \[.*\] and is \['q_proj'\]"),
        ({"base_model": {"uri": other.as_uri(), "sha256": hash_model_folder(other)}}, "base_model was .* and is .*"),
        ({"method": "full", "dtype": "float32"}, "method was lora and is full, .*"),
        ({"optimizer": "adamw_8bit"}, "optimizer was adamw and is adamw_8bit"),
    ):
        said = rf"^checkpoint 3 does not fit the recipe: {named}: restore these values, or submit a new job$"
        with pytest.raises(BadConfiguration, match=said):
            place.train(work, **changed)


def test_adapter_is_loaded_through_host_memory(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an explicit device the library loads it onto the first GPU, in every process."""
    work = tmp_path / "host"
    whole = place.train(work, max_steps=4)
    place.checkpoints(work).discard_from(4)
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: "cuda")
    again = place.train(work, max_steps=4)
    assert facts(again).resumed_from == 2
    assert again.artifacts["adapter"].digest == whole.artifacts["adapter"].digest and losses(again) == losses(whole)


def test_rewound_run_resumes_from_its_rewind_step_and_keeps_used_checkpoints(place: Place, tmp_path: Path) -> None:
    """Rewind to step 4 twice: each branch has its own checkpoints and ends identically."""
    work = tmp_path / "sent-back"
    first = place.train(work)
    checkpoints = place.checkpoints(work)
    recorded = Manifest.model_validate_json((checkpoints.folder / "6" / MANIFEST_FILE).read_bytes()).facts
    assert (recorded["epoch"], recorded["batch_index"], recorded["samples_seen"]) == (0, 6, 24)
    assert isinstance(recorded["elapsed_seconds"], float) and 0 < recorded["elapsed_seconds"] <= facts(first).train_seconds
    kept = {step: hash_model_folder(checkpoints.folder / str(step)) for step in checkpoints.local_steps()}
    assert sorted(kept) == [4, 6, 8]
    sent = [Rewind(step=4, done=8)]
    used = facts(first).train_seconds
    job = place.job(work, {})

    def train() -> Result:
        changed = {**job.parameters, "sent_back": [back.model_dump(mode="json") for back in sent]}
        return place.run(job.model_copy(update={"parameters": changed}), work)

    for way in (checkpoints.branch("from-4"), checkpoints.branch("from-4").branch("from-4")):
        again = train()
        assert facts(again).resumed_from == 4
        assert facts(again).train_seconds > used
        used = facts(again).train_seconds
        assert again.artifacts["adapter"].digest == first.artifacts["adapter"].digest and losses(again) == losses(first)
        assert way.local_steps() == way.stored_steps() == [8, 6]
        pending = pending_in(way.folder / "8")
        logged = [point["step"] for point in pending if point["key"] == "train/loss"]
        assert logged == [1, 2, 3, 4, 5, 6, 7, 8], "what the first way had logged by step 4, and its own"
        unsent = read_unsent_metrics(place.store, result_folder(job))
        left = [(point.step, point.anew) for point in unsent if point.key == "train/loss"]
        assert left == [(step, step > 4) for step in range(1, 9)], "repeated steps are kept in addition to the first ones"
        # after a kill on a branch the run resumes there and does not rewind again
        way.discard_from(8)
        assert facts(train()).resumed_from == 6
        sent += sent[:1]
    assert {step: hash_model_folder(checkpoints.folder / str(step)) for step in checkpoints.local_steps()} == kept

    sent[:] = [Rewind(step=5, done=8)]
    with pytest.raises(BadConfiguration, match=r"there is no valid checkpoint 5. There are: 4, 6, 8"):
        train()


@pytest.mark.parametrize(
    ("resume_from", "sent", "start"),
    [("best", [], 4), (4, [], 4), ("latest", [4], 4), (6, [2], 2), ("latest", [6, 4], 4), ("latest", [4, 6], 6)],
)
def test_best_of_a_rewound_run_is_chosen_from_checkpoints_on_its_path(
    place: Place, tmp_path: Path, resume_from: Literal["latest", "best"] | int, sent: list[int], start: int
) -> None:
    """The best one may precede the rewind step.

    Checkpoints that the run made after that step, before it rewound, do not count.
    """
    checkpoints = place.checkpoints(tmp_path / f"come-by-{resume_from}-{sent}")
    for step, loss in ((2, 2.0), (4, 0.5), (6, 1.0)):
        saved(checkpoints, step, facts={VALIDATION_LOSS_KEY: loss})
    way, found = find_resume_checkpoint(checkpoints, resume_from, [Rewind(step=step) for step in sent])
    assert found is not None and found[0] == start
    best = way.best()
    assert best is not None and best[0] == (2 if 2 in sent else 4)
    assert way.local_steps() == []


def test_rewind_uses_the_latest_branch_with_that_step(place: Place, tmp_path: Path) -> None:
    """After a rewind to 2 the branch has its own steps 4 and 6.

    They take precedence over those of the original branch.
    """
    checkpoints = place.checkpoints(tmp_path / "went-back-again")
    saved(checkpoints, 2, 4)
    saved(checkpoints.branch("from-2"), 4, 6)
    for step in (4, 6):
        way, found = find_resume_checkpoint(checkpoints, "latest", [Rewind(step=2), Rewind(step=step)])
        assert found == (step, checkpoints.folder / "from-2" / str(step))
        assert way.folder == checkpoints.folder / "from-2" / f"from-{step}"
    shutil.rmtree(checkpoints.folder)
    with pytest.raises(BadConfiguration, match=r"there is no valid checkpoint 3. There are: 2, 4, 6"):
        find_resume_checkpoint(checkpoints, "latest", [Rewind(step=2), Rewind(step=3)])


def test_older_checkpoint_without_recipe_facts_is_checked_by_samples_seen(place: Place, tmp_path: Path) -> None:
    checkpoints = place.checkpoints(tmp_path / "older")
    seen = 3 * place.recipe.samples_per_step
    saved(checkpoints, 3, facts={SAMPLES_SEEN: seen})
    check_checkpoint_fits((3, checkpoints.folder / "3"), place.recipe)
    for samples in (seen - 1, seen + 1):
        saved(checkpoints, 3, facts={SAMPLES_SEEN: samples})
        with pytest.raises(BadConfiguration, match=f"checkpoint 3 has seen {samples} of the samples"):
            check_checkpoint_fits((3, checkpoints.folder / "3"), place.recipe)


class Paged(torch.optim.SGD):
    """Like the optimizers of bitsandbytes: only large moments are paged."""

    is_paged = True
    optimizer: torch.optim.Optimizer

    def get_state_buffer(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        room = torch.zeros_like(weight, dtype=dtype)
        room.is_paged = weight.numel() >= 1e5  # type: ignore[attr-defined]
        return room


def test_paged_optimizer_states_are_paged_again_after_loading(tmp_path: Path) -> None:
    small, large = (torch.nn.Parameter(torch.zeros(size)) for size in (10, 200_000))
    optimizer = Paged([small, large], lr=0.1)
    moments = {weight: [torch.randn(weight.numel()) for _ in "12"] for weight in (small, large)}
    for weight, (first, second) in moments.items():
        optimizer.state[weight] = {"step": 3, "state1": first.clone(), "state2": second.clone()}
    trainer = object.__new__(CheckpointingTrainer)
    trainer.saves_sharded = trainer.is_deepspeed_enabled = False
    trainer.args = SimpleNamespace(world_size=1)
    trainer.optimizer = optimizer.optimizer = optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    write_state(optimizer.state_dict(), tmp_path / "optimizer.safetensors")
    write_state(trainer.lr_scheduler.state_dict(), tmp_path / "scheduler.json")
    optimizer.state.clear()
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    for weight, kept in moments.items():
        found = [optimizer.state[weight][key] for key in ("state1", "state2")]
        assert [moment.is_paged for moment in found] == [weight is large] * 2
        assert all(moment.equal(before) for moment, before in zip(found, kept, strict=True))


def test_metrics_of_rewound_steps_are_logged_again() -> None:
    sent = Rewind(step=4, done=8)
    known = ResumeFilter(
        step=4, newest={"train/loss": 8, "mine": 2}, repeated=[RepeatedSteps.from_time(sent.repeated_steps, sent.at)]
    )
    assert last_repeat_time([RepeatedSteps.from_time(sent.repeated_steps, sent.at)], 5) == UNKNOWN_TIME, (
        "an earlier release did not write it down"
    )
    steps = [step for step in range(12) if not known.is_known(Point("train/loss", 1.0, step, 1))]
    assert steps == list(range(12)) and ResumeFilter(4, {"train/loss": 8}).is_known(Point("train/loss", 1.0, 5, 1))


class ForgetfulStore(Store):
    """A store whose first listings are empty, as while its index is rebuilt."""

    forgets = 0

    def list(self, prefix: str) -> list[str]:
        if self.forgets:
            self.forgets -= 1
            return []
        return super().list(prefix)


@pytest.mark.requirement("I13")
def test_restart_never_begins_at_step_0_while_a_complete_checkpoint_exists(tmp_path: Path) -> None:
    store = ForgetfulStore(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    before = CheckpointManager(tmp_path / "first", store, "s3://hanzo-ml/checkpoints/run", 3)
    assert find_resume_checkpoint(before, "latest") == (before, None)
    saved(before, 10, 20)
    elsewhere = CheckpointManager(tmp_path / "second", store, before.uri, 3)
    store.forgets = 1
    with pytest.raises(Restart, match=r"begin at step 0, although there are complete checkpoints in .*/run: 10, 20"):
        find_resume_checkpoint(elsewhere, "latest")
    assert find_resume_checkpoint(elsewhere, "latest")[1] == (20, elsewhere.folder / "20")


def test_best_checkpoint_of_a_run_that_was_never_evaluated_is_refused(tmp_path: Path) -> None:
    store = Store(StoreAddress(root=(tmp_path / "objects").as_uri(), buckets=BUCKETS))
    checkpoints = CheckpointManager(tmp_path / "local", store, "s3://hanzo-ml/checkpoints/run", 3)
    assert find_resume_checkpoint(checkpoints, "best")[1] is None
    saved(checkpoints, 10, 20)
    with pytest.raises(BadConfiguration, match=r"no checkpoint was evaluated. There are: 10, 20"):
        find_resume_checkpoint(checkpoints, "best")
