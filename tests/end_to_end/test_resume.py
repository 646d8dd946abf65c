"""A cancelled job resumes from a chosen step, then with two processes.

It becomes a version, and every step is accounted for.
"""

from collections import Counter
from typing import Any

import pytest

from tests.end_to_end.local_stack import LocalStack

STEPS = 20
"""Fewer than elsewhere: with two processes on two cores each step takes several times as long."""


@pytest.mark.slow
def test_cancelled_job_resumes_from_an_earlier_step_and_then_in_two_processes(
    stack: LocalStack, dataset: str, parameters: dict[str, Any]
) -> None:
    kept = {"interval": "1h", "interval_steps": 4, "keep_last": STEPS}
    course = {"gradient_accumulation": 2, "max_steps": STEPS, "eval_steps": STEPS // 2, "checkpoint": kept}
    job = stack.submit("doors-resumed", dataset, {**parameters, **course})
    stack.wait_for_step(job, 6)
    with stack.paused_until_sigterm(job):
        running = stack.hanzo_ml("job", "resume", job, check=False)
        assert running.returncode == 1 and "cancel it first" in running.stderr
        stack.hanzo_ml("job", "cancel", job)
    stack.wait_until_it_has_ended(job)
    before = dict(stack.losses(job))
    done = max(before)
    assert 6 <= done < STEPS and len(before) == done

    missing = stack.hanzo_ml("job", "resume", job, "--from", "3", check=False)
    assert missing.returncode == 1 and "there is no checkpoint of step 3: there are checkpoints of steps 4" in missing.stderr
    assert stack.hanzo_ml("job", "resume", job, "--from", "4").stdout == f"{job} queued\n"
    stack.wait_for_step_after(job, f"resuming from checkpoint 4 of {STEPS}", done + 1)
    with stack.paused_until_sigterm(job):
        stack.hanzo_ml("job", "cancel", job)
    stack.wait_until_it_has_ended(job)
    losses = stack.losses(job)
    again = max(step for step, _ in losses)
    assert again < STEPS
    assert Counter(step for step, _ in losses) == Counter([*range(1, again + 1), *range(5, done + 1)])
    assert {point for point in losses if point[0] <= done} == set(before.items()), "the same samples once more, bit for bit"

    stack.hanzo_ml("job", "resume", job, "--gpus", "2")
    stack.wait_for("job.completed", job)
    shape = stack.training_job(job).distributed
    assert shape is not None and shape.gpus_per_node == 2
    assert f"resuming from checkpoint {again} of {STEPS}" in (stack.trainer(job) / "log.txt").read_text()
    assert max(step for step, _ in stack.losses(job)) == STEPS
    payloads = [event["payload"] for event in stack.events("job.resumed", key=job)]
    assert [(each["resume_from"], each["gpus"]) for each in payloads] == [(4, None), ("latest", 2)]

    stack.wait_for("model.exported", "doors-resumed")  # another process count changes no later stage
    assert stack.get("/v1/models/doors-resumed/versions/1")["status"] == "ready"
    completed = stack.hanzo_ml("job", "resume", job, check=False)
    assert completed.returncode == 1 and f"job '{job}' is completed" in completed.stderr
