"""Reconciliation of a replica: what it loads next, when it is ready, what it reports."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from resources.errors import SmokeFailed
from resources.serving.client import Served
from resources.serving.deployment_table import DeploymentState, DeploymentTable
from resources.serving.file_cache import FileCache
from resources.serving.reconciler import (
    RETRY_SECONDS,
    Failure,
    Progress,
    Reconciler,
    choose_load,
    find_unsettled,
    list_reports,
)
from resources.serving.replica_messages import WantedDeployment, WantedDeployments

NOW = 1000.0
FAILED = Failure(SmokeFailed("it gave an empty answer"), NOW - 1)


def deployment(id: int, attempt: int = 1, name: str = "m") -> WantedDeployment:
    return WantedDeployment(
        id=id, attempt=attempt, name=name, version=id, sha256=f"{id:064}", size_bytes=1, smoke_prompts=("Who?",)
    )


def served(id: int, status: Literal["loading", "serving", "refused"] = "serving", name: str = "m") -> Served:
    return Served(name=name, version=id, deployment=id, path=Path("/m"), sha256=f"{id:064}", status=status)


@pytest.mark.parametrize(
    ("current", "failures", "chosen"),
    [
        (None, {}, 1),  # with nothing serving, a version that served before is preferred
        (served(1), {}, 2),
        (served(2), {}, None),
        (served(1), {(2, 1): FAILED}, None),
        (served(1), {(2, 1): Failure(FAILED.error, NOW - RETRY_SECONDS)}, 2),
        (None, {(1, 1): FAILED}, 2),
        (None, {(1, 1): FAILED, (2, 1): FAILED}, None),
        (served(1, "refused"), {}, 1),
        (served(3), {(2, 1): FAILED}, 1),  # a rolled back version is replaced by the one that serves elsewhere
        (served(1, "loading"), {(2, 1): FAILED}, None),
    ],
)
def test_newest_version_that_has_not_failed_is_loaded_next(
    current: Served | None, failures: dict[tuple[int, int], Failure], chosen: int | None
) -> None:
    found = choose_load([deployment(1), deployment(2)], current, failures, NOW)
    assert (found.id if found else None) == chosen


def test_new_attempt_is_tried_although_the_one_before_failed() -> None:
    found = choose_load([deployment(2, attempt=2)], served(1), {(2, 1): FAILED}, NOW)
    assert found is not None and found.attempt == 2


def test_replica_is_unsettled_until_each_model_serves_or_failed() -> None:
    expected = [deployment(1), deployment(2, name="other")]
    progress = Progress(notes={2: "downloading"})
    assert find_unsettled(expected, [served(1)], progress) == "other version 2: downloading"
    assert find_unsettled(expected, [served(1), served(2, name="other")], progress) is None
    assert find_unsettled(expected, [served(1)], Progress(failures={(2, 1): FAILED})) is None
    assert find_unsettled([deployment(1), deployment(2)], [served(1)], progress) is None, "the version before answers"


def test_cached_models_settle_a_replica_while_the_api_is_away() -> None:
    assert find_unsettled(None, [served(1, "loading")], Progress()) == "loading m from the cache"
    assert find_unsettled(None, [served(1), served(2, "refused", "other")], Progress()) is None


def test_report_names_what_serves_what_loads_and_what_failed() -> None:
    progress = Progress(failures={(3, 1): FAILED}, notes={2: "downloading"})
    expected = [deployment(1, attempt=4), deployment(2), deployment(3, name="other")]
    reports = list_reports(expected, [served(1), served(9, name="old"), served(3, "refused", "other")], progress)
    assert [(each.deployment, each.attempt, each.status, each.reason, each.error_code) for each in reports] == [
        (1, 4, "serving", "", ""),
        (2, 1, "loading", "downloading", ""),
        (3, 1, "failed", "it gave an empty answer", "SMOKE_FAILED"),
        (9, 0, "serving", "", ""),
    ]


class UnreadableCache(FileCache):
    """A cache that raises an error outside our error classes."""

    async def fetch(self, sha256: str, size_bytes: int, http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> Path:
        raise RuntimeError("bad sector")


def test_unexpected_error_of_a_load_is_reported_and_not_retried_at_once(tmp_path: Path) -> None:
    polls: list[str] = []
    reports: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            reports.append(json.loads(request.content))
            return httpx.Response(200, json={})
        polls.append(request.url.path)
        return httpx.Response(200, content=WantedDeployments(deployments=(deployment(1),)).model_dump_json())

    async def run() -> None:
        async with httpx.AsyncClient() as http:
            table = DeploymentTable(DeploymentState(tmp_path), http)
            reconciler = Reconciler("http://api", "", "a:1", UnreadableCache(tmp_path / "files"), table)
            reconciler._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            loop = asyncio.create_task(reconciler.run())
            while not any(each["deployments"][0]["status"] == "failed" for each in reports):
                await asyncio.sleep(0.01)
            assert reconciler.unready_reason() == ""
            loop.cancel()
            await reconciler.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert "bad sector" in reports[-1]["deployments"][0]["reason"]
    assert len(polls) <= 3
