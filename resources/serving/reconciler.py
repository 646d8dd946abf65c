"""Reconcile a replica with the deployments in the API: poll, download, load, report.

While the API is unavailable, loaded models keep serving and the loop retries.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from pydantic import ValidationError

from resources.errors import ChecksumMismatch, EngineError, EngineUnavailable, UnknownModel
from resources.serving.client import DeployRequest, Served
from resources.serving.deployment_table import DeploymentTable
from resources.serving.file_cache import FileCache
from resources.serving.replica_messages import (
    MAX_REASON_LENGTH,
    DeploymentReport,
    ReplicaReport,
    WantedDeployment,
    WantedDeployments,
)

POLL_SECONDS = 2.0
MAX_POLL_SECONDS = 5.0
"""Maximum pause between two polls while the API is unavailable."""
REPORT_SECONDS = 5.0
RETRY_SECONDS = 60.0
"""Time after which a failed load is retried: memory may have been short."""
REQUEST_TIMEOUT_SECONDS = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a deployment could not be loaded, and when (monotonic clock)."""

    error: EngineError
    at: float


@dataclass
class Progress:
    """Progress of a replica with the wanted deployments, by their ids and attempts."""

    failures: dict[tuple[int, int], Failure] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)


class Reconciler:
    """Loop of one replica.

    Args:
        api_url, token: address and token of the API. The token may be empty if the API has no sign-in.
        replica: name under which it reports.
    """

    def __init__(self, api_url: str, token: str, replica: str, cache: FileCache, table: DeploymentTable) -> None:
        self._api_url = api_url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._replica = replica
        self._cache = cache
        self._table = table
        # No keep-alive: the connection would stay with one replica of the API, even one that is gone.
        self._http = httpx.AsyncClient(
            timeout=REQUEST_TIMEOUT_SECONDS, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )
        self._expected: tuple[WantedDeployment, ...] | None = None
        self._etag = ""
        self._outage = ""
        self._progress = Progress()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._reported: ReplicaReport | None = None
        self._reported_at = 0.0
        self._was_ready = False
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    async def run(self) -> None:
        """Poll until cancelled."""
        pause = POLL_SECONDS
        while not self._draining:
            self._changed.clear()
            try:
                await self._poll()
                await self._apply()
                await self._report()
                if self._outage:
                    log.info("the API at %s answers again", self._api_url)
                self._outage, pause = "", POLL_SECONDS
            except EngineUnavailable as error:
                if not self._outage:
                    log.warning("%s; loaded models keep serving, will retry", error)
                self._outage, pause = str(error), min(pause * 1.5, MAX_POLL_SECONDS)
                await self._apply()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)

    def unready_reason(self) -> str:
        """Return why this replica should get no requests yet; empty once it should.

        It becomes ready once each wanted model answers or has failed, and stays so until it drains: a model that is promoted
        later must not make the replicas of all other models unready.
        """
        if self._draining:
            return "the replica is shutting down"
        if not self._was_ready:
            served = self._table.served()
            if self._expected is None and not served:
                return f"waiting for the API at {self._api_url} to say what to serve: {self._outage or 'no answer yet'}"
            if reason := find_unsettled(self._expected, served, self._progress):
                return reason
            self._was_ready = True
        return ""

    async def drain(self) -> None:
        """Stop polling and loading, and delete this replica's report."""
        self._draining = True
        self._changed.set()
        for task in self._loads.values():
            task.cancel()
        with suppress(httpx.HTTPError):
            await self._http.delete(f"{self._api_url}/v1/engine/replicas/{self._replica}", headers=self._headers)

    async def close(self) -> None:
        self._draining = True
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        await self._http.aclose()

    async def _poll(self) -> None:
        headers = self._headers | ({"If-None-Match": self._etag} if self._etag else {})
        answer = await self._call("GET", "/v1/engine/deployments", headers=headers)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        try:
            self._expected = WantedDeployments.model_validate_json(answer.content).deployments
        except ValidationError:
            raise EngineUnavailable(f"the API at {self._api_url} has an incompatible version") from None
        self._etag = answer.headers.get("ETag", "")

    async def _apply(self) -> None:
        """Start missing loads and removals; do nothing before the first poll."""
        if self._expected is None:
            return
        by_name: dict[str, list[WantedDeployment]] = {}
        for deployment in sorted(self._expected, key=lambda each: each.id):
            by_name.setdefault(deployment.name, []).append(deployment)
        served = {each.name: each for each in self._table.served()}
        self._cancel_obsolete_loads()
        self._forget_obsolete()
        for name in served.keys() - by_name.keys():
            await self._remove(name)
        for name, wishes in by_name.items():
            if name not in self._loads:
                chosen = choose_load(wishes, served.get(name), self._progress.failures, time.monotonic())
                if chosen is not None:
                    task = self._loads[name] = asyncio.create_task(self._load(chosen), name=str(chosen.id))
                    task.add_done_callback(partial(self._end_load, chosen))
        try:
            needed = {each.sha256 for each in self._expected} | {each.sha256 for each in self._table.served()}
            for file in self._cache.evict(needed):
                log.info("deleted %s, which no wanted deployment needs", file)
        except OSError as error:
            log.warning("files that are no longer needed stay in the cache: %s", error.strerror)

    async def _remove(self, name: str) -> None:
        try:
            await self._table.remove(name)
            log.info("%s is no longer served", name)
        except UnknownModel:
            pass
        except EngineError as error:
            log.warning("%s is still served, will retry: %s", name, error)

    def _forget_obsolete(self) -> None:
        assert self._expected is not None
        current = {(each.id, each.attempt) for each in self._expected}
        self._progress.failures = {key: value for key, value in self._progress.failures.items() if key in current}
        self._progress.notes = {key: note for key, note in self._progress.notes.items() if key in {id for id, _ in current}}

    def _cancel_obsolete_loads(self) -> None:
        """Cancel loads of deployments that are no longer wanted.

        Their replacements start once they have ended.
        """
        assert self._expected is not None
        current = {str(each.id) for each in self._expected}
        for task in self._loads.values():
            if task.get_name() not in current:
                task.cancel()

    def _end_load(self, deployment: WantedDeployment, task: asyncio.Task[None]) -> None:
        del self._loads[deployment.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("loading %s version %d failed", deployment.name, deployment.version, exc_info=error)
            failure = EngineError(f"internal error of the replica: {error!r}")
            self._progress.failures[deployment.id, deployment.attempt] = Failure(failure, time.monotonic())
        self._changed.set()

    async def _load(self, deployment: WantedDeployment) -> None:
        """Download and deploy; keep an error for the report."""
        key = deployment.id, deployment.attempt
        try:
            path = await self._download(deployment)
            self._progress.notes[deployment.id] = "loading"
            request = DeployRequest(
                name=deployment.name,
                version=deployment.version,
                deployment=deployment.id,
                path=path.resolve(),
                sha256=deployment.sha256,
                smoke_prompts=deployment.smoke_prompts,
            )
            await self._table.deploy(request)
            self._progress.failures.pop(key, None)
        except EngineUnavailable as error:  # of the download: the API or the store is unavailable
            self._progress.notes[deployment.id] = str(error)
            await asyncio.sleep(POLL_SECONDS)
        except (EngineError, ValidationError) as error:
            if isinstance(error, ChecksumMismatch):
                self._cache.path(deployment.sha256).unlink(missing_ok=True)
            failure = error if isinstance(error, EngineError) else EngineError(f"not deployable: {error}")
            log.error("%s version %d is not served: %s", deployment.name, deployment.version, failure)
            self._progress.failures[key] = Failure(failure, time.monotonic())

    async def _download(self, deployment: WantedDeployment) -> Path:
        self._progress.notes[deployment.id] = "downloading"
        url = f"{self._api_url}/v1/engine/files/{deployment.sha256}"
        return await self._cache.fetch(deployment.sha256, deployment.size_bytes, self._http, url, self._headers)

    async def _report(self) -> None:
        report = ReplicaReport(
            ready=not self.unready_reason(),
            deployments=tuple(list_reports(self._expected or (), self._table.served(), self._progress)),
        )
        now = time.monotonic()
        if report == self._reported and now - self._reported_at < REPORT_SECONDS:
            return
        await self._call(
            "PUT", f"/v1/engine/replicas/{self._replica}", headers=self._headers, json=report.model_dump(mode="json")
        )
        self._reported, self._reported_at = report, now

    async def _call(self, method: str, path: str, **options: object) -> httpx.Response:
        """Call the API.

        Raises:
            EngineUnavailable: it does not answer, or with an error.
        """
        try:
            answer = await self._http.request(method, self._api_url + path, **options)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"the API at {self._api_url} is unavailable ({type(error).__name__})") from None
        if answer.is_success or answer.status_code == httpx.codes.NOT_MODIFIED:
            return answer
        raise EngineUnavailable(f"the API at {self._api_url} answered {answer.status_code}: {answer.text:.200}")


# Pure decisions.


def choose_load(
    wishes: Sequence[WantedDeployment],
    served: Served | None,
    failures: Mapping[tuple[int, int], Failure],
    now: float,
) -> WantedDeployment | None:
    """Choose what to load next under a name, if anything; `wishes` are ordered by id.

    While nothing answers, the oldest comes first: it has served before, its successor has not.
    """
    current = served.deployment if served is not None and served.status != "refused" else None
    for deployment in wishes if current is None else reversed(wishes):
        if deployment.id == current:
            return None
        failure = failures.get((deployment.id, deployment.attempt))
        if failure is None or now - failure.at >= RETRY_SECONDS:
            return deployment
    return None


def find_unsettled(
    expected: Collection[WantedDeployment] | None, served: Collection[Served], progress: Progress
) -> str | None:
    """Describe the first model that neither answers nor has failed.

    Before the first poll, models are those of the cache.
    """
    answers = {each.name for each in served if each.status == "serving"}
    if expected is None:
        loading = [each.name for each in served if each.status == "loading"]
        return f"loading {loading[0]} from the cache" if loading else None
    for deployment in expected:
        failed = (deployment.id, deployment.attempt) in progress.failures
        if deployment.name not in answers and not failed:
            note = progress.notes.get(deployment.id, "loading")
            return f"{deployment.name} version {deployment.version}: {note}"
    return None


def list_reports(
    expected: Collection[WantedDeployment], served: Collection[Served], progress: Progress
) -> list[DeploymentReport]:
    """List the state of each wanted deployment, and of others that still serve."""
    attempts = {each.id: each.attempt for each in expected}
    serving = {each.deployment: each for each in served if each.status == "serving"}
    reports = [
        DeploymentReport(
            deployment=each.deployment,
            attempt=attempts.get(each.deployment, 0),
            name=each.name,
            version=each.version,
            sha256=each.sha256,
            status="serving",
            loaded_at=each.loaded_at,
            smoke=each.smoke,
        )
        for each in serving.values()
    ]
    for deployment in expected:
        if deployment.id in serving:
            continue
        failure = progress.failures.get((deployment.id, deployment.attempt))
        reports.append(
            DeploymentReport(
                deployment=deployment.id,
                attempt=deployment.attempt,
                name=deployment.name,
                version=deployment.version,
                sha256=deployment.sha256,
                status="failed" if failure else "loading",
                reason=str(failure.error)[:MAX_REASON_LENGTH] if failure else progress.notes.get(deployment.id, ""),
                error_code=failure.error.code.value if failure else "",
            )
        )
    return sorted(reports, key=lambda each: each.deployment)
