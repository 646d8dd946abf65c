"""What a replay has shown, put together from what both runs left."""

from collections.abc import Mapping, Sequence

from recipes.contracts.frozen_model import Frozen
from recipes.storage.artifact_store import Store
from resources.errors import invalid
from resources.metadata.database import Database
from resources.replay.comparison import FileDifference, StepDifference, compare
from resources.replay.environment import Difference, differences, of_processes
from resources.replay.finished_run import FinishedRun, read_finished, weights_of
from resources.replay.healing import Unrepeated, unrepeated
from resources.replay.tracked import first_untrue, tracked_losses


class Verdict(Frozen):
    """`equal` means every loss and the hash of the final weights, and that no other loss is tracked of the first run than it
    had: `untrue` is the first step of which one is. `environment` and `unrepeated` may explain why they are not: the replay
    computed elsewhere, or only one of the two runs was healed of something.
    """

    run: str
    replay: str
    equal: bool
    steps: int
    first_difference: StepDifference | None
    untrue: StepDifference | None
    weights: tuple[FileDifference, ...]
    environment: tuple[Difference, ...]
    unrepeated: tuple[Unrepeated, ...]


def read_verdict(database: Database, store: Store, replay_id: str) -> Verdict:
    """Compare a completed replay with its first run.

    Raises:
        HanzoError: there is no such run, it is not completed, or it is no replay.
    """
    replay = read_finished(database, store, replay_id)
    original = replay.job.replay_of
    if original is None:
        raise invalid(f"run '{replay_id}' is no replay: `hanzo-ml run replay {replay_id}` makes one of it")
    return judge(read_finished(database, store, original), replay, tracked_losses(database, original), store)


def judge(first: FinishedRun, replay: FinishedRun, tracked: Mapping[int, Sequence[float]], store: Store) -> Verdict:
    untrue = first_untrue(first.losses, tracked, first.done_anew)
    found = compare(first.losses, replay.losses, weights_of(first, store), weights_of(replay, store))
    return Verdict(
        run=first.job.id,
        replay=replay.job.id,
        equal=found.equal and untrue is None,
        steps=found.steps,
        first_difference=found.first_difference,
        untrue=untrue,
        weights=found.weights,
        environment=(
            *differences(first.record.environment, first.machine, replay.record.environment, replay.machine),
            *of_processes(first.processes, replay.processes),
        ),
        unrepeated=unrepeated(first.incidents, replay.incidents),
    )
