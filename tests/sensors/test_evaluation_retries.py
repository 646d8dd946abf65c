"""Steps after a training are retried after infrastructure failures, never after user errors."""

from datetime import timedelta

import dagster as dg
import pytest

from hanzo_ml_assets.failure_reason import reports_exit_reason
from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import BadConfiguration
from recipes.storage.buckets import StoreUnavailable
from resources.compute.base import JobFailed, Observation, Phase, failure
from resources.metadata.outbox import read_after
from sensors import retry_dead_runs as retries
from sensors.decisions.job_runs import PRIORITY_TAG
from sensors.decisions.retry_policy import FAILURE_REASON_TAG, MAX_ERROR_RETRIES, RETRIED_RUN_TAG, RETRIES_TAG
from sensors.retry_dead_runs import retry_dead_runs
from tests.support.recipes.command_program import CommandJobs, commands
from tests.support.resources.model_versions import artifact, model, registration
from tests.support.sensors.sensor_harness import MODEL, SensorHarness, harness, keys, repository

__all__ = ["commands", "harness", "repository"]  # fixtures
KEY = dg.AssetKey(["models", MODEL, "evaluation"])


def evaluate(harness: SensorHarness, error: Exception, **tags: str) -> str:
    """Record an evaluation of job-1 that ends with this error; return its id."""

    @dg.asset(key=KEY, partitions_def=dg.DynamicPartitionsDefinition(name=f"{MODEL}-runs"))
    @reports_exit_reason
    def evaluation() -> None:
        raise error

    harness.instance.add_dynamic_partitions(f"{MODEL}-runs", ["job-1"])
    job = dg.Definitions(assets=[evaluation]).get_implicit_global_asset_job_def()
    result = job.execute_in_process(
        instance=harness.instance,
        partition_key="job-1",
        asset_selection=[KEY],
        raise_on_error=False,
        tags={FAILURE_REASON_TAG: "STEP_FAILURE", **tags},
    )
    return str(result.run_id)


@pytest.fixture
def trained(harness: SensorHarness, monkeypatch: pytest.MonkeyPatch) -> SensorHarness:
    monkeypatch.setattr(retries, "ERROR_RETRY_PAUSE", timedelta(0))
    harness.submit("job-1")
    harness.complete("job-1")
    return harness


@pytest.mark.parametrize(
    ("error", "tried", "again"),
    [
        (JobFailed("evaluate job-1 failed after 12 attempts: killed", ExitReason.KILLED), 0, True),
        (StoreUnavailable("no answer"), MAX_ERROR_RETRIES - 1, True),
        (StoreUnavailable("no answer"), MAX_ERROR_RETRIES, False),
        (ValueError("the model gives no finite logits"), 0, False),
    ],
    ids=["killed", "store-away", "too-often", "users"],
)
def test_evaluation_failed_by_infrastructure_is_retried_up_to_the_limit(
    trained: SensorHarness, error: Exception, tried: int, again: bool
) -> None:
    run = evaluate(trained, error, **{RETRIES_TAG: str(tried), PRIORITY_TAG: "1"})
    requests = trained.tick(retry_dead_runs)
    assert [request.tags[PRIORITY_TAG] for request in requests] == ["1"] * again
    assert [(keys(request), request.partition_key) for request in requests] == [([KEY.to_user_string()], "job-1")] * again
    assert [(request.tags[RETRIED_RUN_TAG], request.tags[RETRIES_TAG]) for request in requests] == [
        (run, str(tried + 1))
    ] * again
    reason = trained.plane.jobs.read("job-1").reason
    assert str(error) in reason and run in reason
    assert reason.endswith("which is tried again") == again
    with trained.plane.database.read() as connection:
        errors = [event.payload["error"] for event in read_after(connection, 0, ["evaluation.failed"])]
    assert errors == [reason]


@pytest.mark.parametrize("reason", ExitReason)
def test_only_the_reason_decides_whether_an_evaluation_is_retried(trained: SensorHarness, reason: ExitReason) -> None:
    """Neither the message nor the name of the exception's class matters."""

    class RenamedFailure(JobFailed):
        pass

    evaluate(trained, RenamedFailure("no space left, killed, out of memory", reason))
    assert len(trained.tick(retry_dead_runs)) == reason.is_infrastructure


@pytest.mark.parametrize("reason", ExitReason)
def test_failed_observation_becomes_the_exception_for_its_exit_reason(commands: CommandJobs, reason: ExitReason) -> None:
    problem = failure(commands.job(""), Observation(Phase.FAILED, 12, "killed: no space left", reason))
    if reason is ExitReason.BAD_CONFIGURATION:
        assert isinstance(problem, BadConfiguration) and str(problem) == "killed: no space left"
    else:
        assert isinstance(problem, JobFailed) and problem.reason is reason
        assert str(problem).endswith("failed after 12 attempts: killed: no space left")


@pytest.mark.parametrize(("attempt", "counted"), [(1, "after 1 attempt:"), (2, "after 2 attempts:")])
def test_failure_message_counts_attempts_in_words(commands: CommandJobs, attempt: int, counted: str) -> None:
    assert counted in str(failure(commands.job(""), Observation(Phase.FAILED, attempt, "no", ExitReason.PROGRAM_ERROR)))


def test_abandoned_export_marks_the_version_failed(trained: SensorHarness) -> None:
    """Also when its worker died without recording anything."""
    with trained.plane.database.write() as connection:
        made = trained.plane.registry.register(connection, model(), registration("job-1"), {"adapter": artifact("adapter")})
    gguf = dg.AssetKey(["models", MODEL, "gguf"])

    @dg.asset(key=gguf, partitions_def=dg.DynamicPartitionsDefinition(name=f"{MODEL}-runs"))
    def export() -> None:
        raise ValueError("no name for the pre-tokenizer")

    trained.instance.add_dynamic_partitions(f"{MODEL}-runs", ["job-1"])
    dg.Definitions(assets=[export]).get_implicit_global_asset_job_def().execute_in_process(
        instance=trained.instance,
        partition_key="job-1",
        asset_selection=[gguf],
        raise_on_error=False,
        tags={FAILURE_REASON_TAG: "STEP_FAILURE"},
    )
    trained.tick(retry_dead_runs)
    with trained.plane.database.read() as connection:
        found = trained.plane.registry.get(made.model, made.version, connection)
    assert found.status == "failed" and "no name for the pre-tokenizer" in found.reason
