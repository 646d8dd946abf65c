"""A job in two processes, from submission to a registered model: what shares the work changes nothing around it."""

from typing import Any

import pytest

from tests.chain.local_stack import LocalStack


@pytest.mark.slow
def test_a_job_in_two_processes_becomes_a_version(stack: LocalStack, dataset: str, parameters: dict[str, Any]) -> None:
    shape = {"strategy": "fsdp", "gpus_per_node": 2, "backend": "gloo"}
    few = parameters | {"gradient_accumulation": 1, "max_steps": 4, "eval_steps": 2, "distributed": shape}
    job = stack.submit("doors-shared", dataset, few)
    stack.wait_for("job.completed", job)
    assert [step for step, _ in stack.losses(job)] == [1, 2, 3, 4]
    stack.wait_for("model.exported", "doors-shared")
    assert stack.get("/v1/models/doors-shared/versions/1")["status"] == "ready"
