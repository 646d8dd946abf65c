"""What follows a training and fails for a reason of the machine is tried again a few times; for the user's reason never."""

from datetime import timedelta

import dagster as dg
import pytest

from recipes.buckets import StoreUnavailable
from resources.compute.base import MachineFailed, NoStore, Observation, Phase, RefusedByStore, failure
from resources.metadata.outbox import read_after
from sensors import retry_dead_runs as retries
from sensors.failed_runs import MAX_AGAIN
from sensors.retries import FAILURE_REASON, RETRIES, RETRY_OF
from sensors.retry_dead_runs import retry_dead_runs
from sensors.runs_of_jobs import PRIORITY_TAG
from tests.recipes.command.test_program import House as Commands
from tests.recipes.command.test_program import house as commands
from tests.sensors.test_decisions import MODEL, House, house, keys, repository

__all__ = ["commands", "house", "repository"]  # fixtures
KEY = dg.AssetKey(["models", MODEL, "evaluation"])


def evaluate(house: House, error: Exception, **tags: str) -> str:
    """A run of the evaluation of job-1 that ends with this error; returns its id."""

    @dg.asset(key=KEY, partitions_def=dg.DynamicPartitionsDefinition(name=f"{MODEL}-runs"))
    def evaluation() -> None:
        raise error

    house.instance.add_dynamic_partitions(f"{MODEL}-runs", ["job-1"])
    job = dg.Definitions(assets=[evaluation]).get_implicit_global_asset_job_def()
    result = job.execute_in_process(
        instance=house.instance,
        partition_key="job-1",
        asset_selection=[KEY],
        raise_on_error=False,
        tags={FAILURE_REASON: "STEP_FAILURE", **tags},
    )
    return str(result.run_id)


@pytest.fixture
def trained(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(retries, "AGAIN_PAUSE", timedelta(0))
    house.submit("job-1")
    house.complete("job-1")
    return house


@pytest.mark.parametrize(
    ("error", "tried", "again"),
    [
        (MachineFailed("evaluate job-1 failed after 12 attempts: killed"), 0, True),
        (StoreUnavailable("no answer"), MAX_AGAIN - 1, True),
        (StoreUnavailable("no answer"), MAX_AGAIN, False),
        (ValueError("the model gives no finite logits"), 0, False),
    ],
    ids=["killed", "store-away", "too-often", "users"],
)
def test_it_is_tried_again_where_the_machine_is_to_blame(trained: House, error: Exception, tried: int, again: bool) -> None:
    run = evaluate(trained, error, **{RETRIES: str(tried), PRIORITY_TAG: "1"})
    requests = trained.tick(retry_dead_runs)
    assert [request.tags[PRIORITY_TAG] for request in requests] == ["1"] * again
    assert [(keys(request), request.partition_key) for request in requests] == [([KEY.to_user_string()], "job-1")] * again
    assert [(request.tags[RETRY_OF], request.tags[RETRIES]) for request in requests] == [(run, str(tried + 1))] * again
    reason = trained.plane.jobs.read("job-1").reason
    assert str(error) in reason and run in reason
    assert reason.endswith("which is tried again") == again
    with trained.plane.database.read() as connection:
        told = [event.payload["error"] for event in read_after(connection, 0, ["evaluation.failed"])]
    assert told == [reason]


@pytest.mark.parametrize(
    ("detail", "code", "of_machine"),
    [
        ("killed by the kernel, for want of memory", None, True),
        ("the container was ended", 137, True),
        ("starting again: the store gives no answer", 75, True),
        ("torch.OutOfMemoryError: CUDA out of memory", 1, True),
        ("it took longer than schedule.max_duration, 1h", None, False),
        ("ValueError: the answer was killed by a filter", 1, False),
    ],
)
def test_whose_reason_it_is(commands: Commands, detail: str, code: int | None, of_machine: bool) -> None:
    problem = failure(commands.job(""), Observation(Phase.FAILED, 12, detail, code))
    assert isinstance(problem, MachineFailed) == of_machine


@pytest.mark.parametrize(
    ("detail", "code", "no_store"),
    [
        ("no space left for /scratch/state.pt: free some space, then retry; nothing saved so far is lost", 1, True),
        ("starting again: the object store gives no answer, or refuses: s3://hanzo-ml: Read-only file system", 75, True),
        ("ValueError: there is no space left in the line", 1, False),
        ("starting again: on with half the batch", 75, False),
        ("killed by the kernel, for want of memory", None, False),
    ],
)
def test_what_had_no_store_is_told_from_others(commands: Commands, detail: str, code: int | None, no_store: bool) -> None:
    problem = failure(commands.job(""), Observation(Phase.FAILED, 1, detail, code))
    assert isinstance(problem, NoStore) == no_store


@pytest.mark.parametrize(
    ("said", "refused"), [("refuses: s3://x: no bucket", True), ("gives no answer, or refuses: x", False)]
)
def test_a_store_that_refuses_for_good_is_told_from_one_that_is_away(commands: Commands, said: str, refused: bool) -> None:
    observation = Observation(Phase.FAILED, 12, f"starting again: the object store {said}", 75)
    assert isinstance(failure(commands.job(""), observation), RefusedByStore) == refused


@pytest.mark.parametrize(("attempt", "counted"), [(1, "after 1 attempt:"), (2, "after 2 attempts:")])
def test_attempts_are_counted_in_words(commands: Commands, attempt: int, counted: str) -> None:
    assert counted in str(failure(commands.job(""), Observation(Phase.FAILED, attempt, "no", 1)))
