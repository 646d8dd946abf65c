"""The chain under random kills of the stack's processes ends as an undisturbed one."""

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import Baseline
from tests.end_to_end.local_stack import LocalStack, wait_until
from tests.end_to_end.process_killer import coming_up, dying

ROUNDS = 8
STAGE_SECONDS = 600.0
NAME = "doors-among-kills"


@pytest.mark.slow
@pytest.mark.long
def test_whole_chain_survives_random_kills(stack: LocalStack, baseline: Baseline, raw_data: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # to reproduce a failure
    killed: list[str] = []
    with dying(stack, random.Random(seed), killed, ROUNDS), coming_up(stack, killed):
        made = said(stack, "dataset", "create", "--name", "colours-again", "--path", str(raw_data))
        config = stack.home / f"{NAME}.json"
        config.write_text(
            json.dumps({"name": NAME, "dataset": f"colours-again@{made['version']}", "parameters": baseline.parameters})
        )
        job = str(said(stack, "job", "submit", "--config", str(config))["id"])
        happened(stack, "job.completed", job)
        happened(stack, "model.exported", NAME)
        answered(stack, "model", "promote", "--name", NAME, "--version", "1", "--stage", "production")
        happened(stack, "deployment.serving", NAME)
    stack.hanzo_ml("up")
    print("\n".join(killed))
    assert killed
    assert stack.losses(job) == baseline.losses
    assert stack.adapter_sha256(job) == baseline.adapter_sha256
    assert [version["version"] for version in stack.get(f"/v1/models/{NAME}/versions")["versions"]] == [1]
    for event, key in (("job.completed", job), ("model.registered", NAME), ("model.exported", NAME)):
        assert len(stack.events(event, key=key)) == 1, event
    assert json.loads(stack.hanzo_ml("model", "prove", NAME, "1", "--json").stdout)["ok"]


def said(stack: LocalStack, *command: str) -> dict[str, Any]:
    return dict(json.loads(answered(stack, *command, "--json")))


def answered(stack: LocalStack, *command: str) -> str:
    """Return a command's output, repeating it as a user does while the server is unavailable."""

    def printed() -> str | None:
        done = stack.hanzo_ml(*command, check=False)
        return done.stdout if done.returncode == 0 else None

    return wait_until(" ".join(command), printed, seconds=STAGE_SECONDS, every=1)


def happened(stack: LocalStack, event: str, key: str) -> None:
    def found() -> list[dict[str, Any]]:
        try:
            return stack.events(event, key=key)
        except httpx.HTTPError:
            return []

    wait_until(f"{event} of {key}", found, seconds=STAGE_SECONDS, every=1)
