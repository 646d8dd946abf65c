"""Preparing a run: what is refused before loading, and what it resumes with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hanzo_ml.client.repeated_steps import UNKNOWN_TIME, RepeatedSteps
from recipes.checkpoints.node_parts import NodeShard
from recipes.contracts.job import BadConfiguration
from recipes.contracts.recipe import Recipe
from recipes.contracts.recovery_log import (
    Diverged,
    OutOfMemory,
    RecoveryEvent,
    RecoveryLog,
    add_recovery_event,
    read_recovery_log,
)
from recipes.contracts.rewind import Rewind
from recipes.training import run_setup
from recipes.training import run_setup as taken_up
from recipes.training.checkpointing.resume_point import ResumePlan as Beginning
from recipes.training.checkpointing.resume_point import describe_recipe
from recipes.training.data.sample_order import SAMPLES_SEEN
from recipes.training.parallel.process_group import ProcessGroup
from recipes.training.run_setup import RunState, node_share, prepare_run
from tests.recipes.training.parallel_strategies import shape
from tests.recipes.training.training_workspace import CHECKPOINTS, Place, saved

LEFT_OUT = Diverged(step=5, noticed=6, reason="nan", rolled_back_to=2, skipped=(12, 24), at=1700)
SMALLER = OutOfMemory(step=3, batch_size=2, gradient_accumulation=2, after=2)
FSDP = {"method": "full", "dtype": "float32", "distributed": {"strategy": "fsdp", "gpus_per_node": 2, "num_nodes": 2}}


class Several(ProcessGroup):
    """One of several processes, simulated in this one; `broadcasts` are those of the leader."""

    def __init__(self, rank: int, size: int, local_size: int, broadcasts: Sequence[Any] = ()) -> None:
        super().__init__(rank, 1, rank % local_size, local_size)
        self.size, self._broadcasts = size, iter(broadcasts)

    def broadcast(self, value: Any) -> Any:
        return value if self.is_leader else next(self._broadcasts)

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size


def first_broadcasts(*incidents: RecoveryEvent) -> list[Any]:
    """Return the broadcasts of a leader without a checkpoint, in order.

    The recovery log, what is in the store, the resume point, and the recovery log again.
    """
    return [RecoveryLog(entries=incidents), ([], {}, set()), Beginning(()), RecoveryLog(entries=incidents)]


def took_up(place: Place, work: Path, repeats: tuple[RecoveryEvent, ...] = (), **changed: Any) -> RunState:
    job = place.job(work, changed, repeats)
    work.mkdir(parents=True, exist_ok=True)
    return prepare_run(job, place.store, work)


def save(place: Place, work: Path, *steps: int, recipe: Recipe | None = None) -> None:
    for step in steps:
        facts = {SAMPLES_SEEN: step * 4, "made_with": describe_recipe(recipe or place.recipe)}
        saved(place.checkpoints(work), step, facts=facts)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[ProcessGroup]:
    """Return the groups that a program may join: it joins the last one."""
    groups = [ProcessGroup()]
    monkeypatch.setattr(taken_up, "join_process_group", lambda distributed: groups[-1])
    return groups


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"hardware": {"gpus": 2}}, "add distributed"), ({"optimizer": "paged_adamw"}, "there is no GPU here")],
    ids=["what-is-missing", "what-the-machine-lacks"],
)
def test_untrainable_recipe_is_refused_before_joining_the_process_group(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(run_setup.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(taken_up, "join_process_group", lambda distributed: pytest.fail("it joined"))
    with pytest.raises(BadConfiguration, match=words):
        took_up(place, tmp_path / "course-refused", **changed)


@pytest.mark.parametrize(
    ("strategy", "model_parallel_size", "is_pipelined"), [("ddp", 1, False), ("tensor", 2, False), ("pipeline", 4, True)]
)
def test_recipe_is_adapted_to_the_processes_present(
    place: Place, tmp_path: Path, joined: list[ProcessGroup], strategy: str, model_parallel_size: int, is_pipelined: bool
) -> None:
    joined.append(Several(0, 4, 4))
    changed = {**FSDP, "distributed": shape(strategy, 2)}
    course = took_up(place, tmp_path / f"course-four-{strategy}", **changed)
    assert (course.recipe.processes, course.recipe.samples_per_step) == (4, place.recipe.changed(changed).samples_per_step)
    assert (course.group.model_parallel_size, course.group.is_pipelined) == (model_parallel_size, is_pipelined)


def test_fallback_to_float32_is_logged_only_by_the_leader(
    place: Place,
    tmp_path: Path,
    joined: list[ProcessGroup],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("recipes.training.precision.CPUINFO", tmp_path / "course-none")
    monkeypatch.setattr(run_setup.torch.cuda, "is_available", lambda: False)
    took_up(place, tmp_path / "course-leader", base_dtype="bfloat16")
    assert "no instructions for bfloat16: computing in float32" in capsys.readouterr().out
    joined.append(Several(1, 2, 2, first_broadcasts()))
    took_up(place, tmp_path / "course-other", base_dtype="bfloat16")
    assert "computing in float32" not in capsys.readouterr().out


def test_fallback_to_cpu_is_logged_only_by_the_leader(
    place: Place,
    tmp_path: Path,
    joined: list[ProcessGroup],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a broken driver, training would take days without any explanation."""
    message = "the recipe asks for 1 GPU, and PyTorch finds none here: training on the processor"
    monkeypatch.setattr(run_setup.torch.cuda, "is_available", lambda: False)
    took_up(place, tmp_path / "course-no-gpu", hardware={"gpus": 1})
    assert message in capsys.readouterr().out
    took_up(place, tmp_path / "course-none-wanted")
    monkeypatch.setattr(run_setup.torch.cuda, "is_available", lambda: True)
    took_up(place, tmp_path / "course-with-gpu", hardware={"gpus": 1})
    monkeypatch.setattr(run_setup.torch.cuda, "is_available", lambda: False)
    joined.append(Several(1, 2, 2, first_broadcasts()))
    took_up(place, tmp_path / "course-no-gpu-other", hardware={"gpus": 1})
    assert "processor" not in capsys.readouterr().out


def test_other_processes_use_recovery_log_of_leader_and_write_nothing(
    place: Place, tmp_path: Path, joined: list[ProcessGroup]
) -> None:
    work = tmp_path / "course-other-process"
    joined.append(Several(1, 2, 2, first_broadcasts(SMALLER)))
    course = took_up(place, work, repeats=(LEFT_OUT,))
    assert course.incidents.entries == (SMALLER,) and course.recipe.batch_size == 2
    assert read_recovery_log(place.store, course.uri) == RecoveryLog()


def test_checkpoint_policy_sets_retention_and_compression(place: Place, tmp_path: Path, joined: list[ProcessGroup]) -> None:
    policy = {"interval_steps": 2, "keep_last": 5, "compression": "zstd"}
    checkpoints = took_up(place, tmp_path / "course-policy", checkpoint=policy).checkpoints
    assert (checkpoints.keep_last, checkpoints.stored.compression, checkpoints.share) == (5, "zstd", None)
    joined.append(Several(0, 4, 2))
    assert took_up(place, tmp_path / "course-two-nodes", **FSDP).checkpoints.share == NodeShard(1, 2, 2)


def test_node_fetches_only_its_share_of_a_sharded_checkpoint(place: Place) -> None:
    spread = place.recipe.changed(FSDP)
    assert node_share(spread, Several(2, 4, 2)) == NodeShard(2, 2, 2)
    assert node_share(spread, Several(1, 2, 2)) is None, "there is one node"
    assert node_share(place.recipe, Several(2, 4, 2)) is None, "an adapter is whole on each"


def test_run_resumes_from_step_of_policy_or_rewind(place: Place, tmp_path: Path) -> None:
    policy = {"interval_steps": 2, "keep_last": 3, "resume_from": 2}
    save(place, tmp_path / "course-asked", 2, 4)
    asked = took_up(place, tmp_path / "course-asked", checkpoint=policy)
    assert asked.resume and asked.resume[0] == 2 and asked.checkpoints.folder.name == "from-2"

    work, back = tmp_path / "course-sent-back", Rewind(step=2, done=4, at=9)
    save(place, work, 2, 4)
    job = place.job(work, {})
    job = job.model_copy(update={"parameters": {**job.parameters, "sent_back": [back.model_dump(mode="json")]}})
    sent = prepare_run(job, place.store, work)
    assert sent.resume and sent.resume[0] == 2 and sent.checkpoints.folder.name == "from-2"
    assert sent.uri == CHECKPOINTS.format(work.name), "of the run, and not of its way"
    assert sent.repeated_steps == (RepeatedSteps(range(3, 5), 9),)


def test_a_checkpoint_of_another_recipe_is_refused(place: Place, tmp_path: Path) -> None:
    save(place, tmp_path / "course-other-recipe", 2, recipe=place.recipe.changed({"lora_rank": 8}))
    with pytest.raises(BadConfiguration, match="checkpoint 2 does not fit the recipe: lora_rank was 8 and is 4"):
        took_up(place, tmp_path / "course-other-recipe")


def test_upload_missed_by_a_kill_is_made_on_resume(place: Place, tmp_path: Path) -> None:
    save(place, tmp_path / "course-killed", 2, 4)
    place.store.delete(f"{CHECKPOINTS.format('killed')}/4")
    course = took_up(place, tmp_path / "course-killed")
    course.checkpoints.wait()
    assert course.checkpoints.stored_steps() == [4, 2]


def test_replay_applies_recovery_events_from_their_steps_on(place: Place, tmp_path: Path) -> None:
    work, repeats = tmp_path / "course-replay", (LEFT_OUT, SMALLER)
    first = took_up(place, work, repeats)
    assert (first.incidents.entries, first.recipe.batch_size, first.repeats) == ((LEFT_OUT,), 4, repeats)
    assert read_recovery_log(place.store, first.uri).entries == (LEFT_OUT,)
    save(place, work, 2)
    then = took_up(place, work, repeats)
    assert (then.incidents.entries, then.recipe.batch_size, then.repeats) == (repeats, 2, repeats)


def test_repeated_steps_follow_own_divergences_and_rewinds_only(place: Place, tmp_path: Path) -> None:
    """Replayed events repeat no steps of this run: its metrics are new."""
    work = tmp_path / "course-anew"
    add_recovery_event(place.store, CHECKPOINTS.format(work.name), LEFT_OUT)
    course = replace(took_up(place, work), sent_back=(Rewind(step=2, done=6, at=9), Rewind(step=1, done=3), Rewind(step=1)))
    healed, *sent = course.repeated_steps
    assert healed == RepeatedSteps(range(4, 7), 1700)
    assert sent == [
        RepeatedSteps(range(3, 7), 9),
        RepeatedSteps(range(2, 4), UNKNOWN_TIME),
        RepeatedSteps(range(2, 2), UNKNOWN_TIME),
    ]
    assert replace(course, repeats=(LEFT_OUT,), sent_back=()).repeated_steps == ()
