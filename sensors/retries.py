"""Retries of Dagster runs: a new run of the same assets, tagged with the run that it retries and their number."""

import dagster as dg

from hanzo_ml_assets.preparation import PREPARATION_TAG
from hanzo_ml_assets.run_tags import ORGANIZATION_TAG, VERSION_TAG
from sensors.decisions.job_runs import PARTITION_TAG, PRIORITY_TAG

RETRY_OF = "hanzo_ml/retry_of"
RETRIES = "hanzo_ml/retries"
MAX_RETRIES = 20
FAILURE_REASON = "dagster/failure_reason"
DATA_TAGS = (VERSION_TAG, ORGANIZATION_TAG, PREPARATION_TAG)
"""Tags by which a run without a partition knows what it works on."""


def retry(run: dg.DagsterRun, *, got_on: bool = False) -> dg.RunRequest:
    """Programs go on from what is there, and work that is done is not done again. A run that `got_on` is none of those that
    failed in vain, which end at `MAX_RETRIES`.
    """
    kept = {tag: run.tags[tag] for tag in (PRIORITY_TAG, *DATA_TAGS) if tag in run.tags}
    return dg.RunRequest(
        run_key=f"retry-{run.run_id}",
        asset_selection=sorted(run.asset_selection or ()),
        partition_key=run.tags.get(PARTITION_TAG),
        tags={**kept, RETRY_OF: run.run_id, RETRIES: str(1 if got_on else retries_of(run) + 1)},
    )


def retries_of(run: dg.DagsterRun) -> int:
    return int(run.tags.get(RETRIES, "0"))


def was_retried(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    return bool(instance.get_runs(dg.RunsFilter(tags={RETRY_OF: run.run_id}), limit=1))


def may_be_retried(run: dg.DagsterRun) -> bool:
    """Whether the run's worker died. An error of its own would only repeat itself."""
    died = run.tags.get(FAILURE_REASON) != "STEP_FAILURE"
    return died and bool(run.asset_selection) and retries_of(run) < MAX_RETRIES


def steps_of(run: dg.DagsterRun) -> set[str]:
    return {key.path[-1] for key in run.asset_selection or ()}


def has_active_retry(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a newer run does some of the same work, or any other run of it is still in progress."""
    works_on = {tag: run.tags[tag] for tag in (PARTITION_TAG, *DATA_TAGS) if tag in run.tags}
    if not works_on:
        return False
    found = [each for each in instance.get_runs(dg.RunsFilter(tags=works_on)) if steps_of(each) & steps_of(run)]
    return any(not each.is_finished for each in found) or any(each.run_id != run.run_id for each in found[:1])
