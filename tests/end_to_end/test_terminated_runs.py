"""Terminating a run in Dagster's UI cancels its job.

A program whose worker is dead ends with its job.
"""

import os
import signal
from typing import Any

import pytest

from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.support.assets.dagster_graphql import graphql

STEPS = 12


@pytest.mark.slow
def test_terminating_the_run_in_dagster_cancels_the_job_which_can_be_resumed(
    stack: LocalStack, dataset: str, parameters: dict[str, Any]
) -> None:
    job = stack.submit("doors-terminated", dataset, {**parameters, "max_steps": STEPS, "eval_steps": STEPS // 2})
    stack.wait_for_step(job, 4)
    query = """query($tags: [ExecutionTag!]) {
        runsOrError(filter: {tags: $tags}) { ... on Runs { results { runId status } } } }"""
    tags = [{"key": "dagster/partition", "value": job}]
    mutation = "mutation($id: String!) { terminateRun(runId: $id) { __typename } }"
    with stack.paused_until_sigterm(job):
        (run,) = graphql(stack, query, tags=tags)["runsOrError"]["results"]
        assert graphql(stack, mutation, id=run["runId"])["terminateRun"]["__typename"] == "TerminateRunSuccess"
    stack.wait_for("job.cancelled", job)
    assert stack.get(f"/v1/jobs/{job}")["reason"] == f"its run was terminated in Dagster (run {run['runId']})"
    stack.wait_until_it_has_ended(job)
    assert len(stack.losses(job)) < STEPS
    stack.hanzo_ml("job", "resume", job)
    stack.wait_for("job.completed", job)
    assert [step for step, _ in stack.losses(job)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_job_cancelled_while_its_worker_dies_leaves_no_program(
    stack: LocalStack, dataset: str, parameters: dict[str, Any]
) -> None:
    job = stack.submit("doors-orphaned", dataset, {**parameters, "max_steps": 10_000})
    stack.wait_for_step(job, 2)
    os.kill(stack.pid(stack.run_worker(job)), signal.SIGKILL)
    stack.hanzo_ml("job", "cancel", job)
    stack.wait_until_it_has_ended(job)
    wait_until("the end of all run workers", lambda: not stack.run_workers())
    assert stack.get(f"/v1/jobs/{job}")["status"] == "cancelled"
    assert "checkpoint" in (stack.trainer(job) / "log.txt").read_text().splitlines()[-1], "it was asked to end, and saved"
