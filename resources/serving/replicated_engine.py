"""The control plane's view of replicas that pull, through the metadata database only.

It has the interface of `EngineClient`, which is for an engine that deployments are pushed to.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenacity import Retrying, retry_if_result, stop_never, wait_fixed

from recipes.contracts.quantities import pluralize
from resources.errors import BadRequest, EngineError, EngineUnavailable, UnknownModel
from resources.metadata.database import Database
from resources.metadata.registry import engine_replicas
from resources.metadata.registry.deployments import Deployment, find_by_promotion
from resources.metadata.registry.engine_replicas import LIVE_SECONDS, Replica
from resources.serving.client import EngineClient, Refusal, Served, from_refusal
from resources.serving.replica_messages import DeploymentReport
from resources.settings.settings import Settings

POLL_SECONDS = 1.0
ABSENT_SECONDS = 180.0
"""How long a deployment waits for the first replica that reports."""
DEPLOY_SECONDS = 1800.0
"""How long a deployment waits for all replicas to download, load and test it."""


@dataclass(frozen=True)
class ReplicaState:
    """One deployment in one replica, for people."""

    replica: str
    status: str
    reason: str


class ReplicatedEngine:
    """The replicas that report to the API."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def served(self) -> list[Served]:
        """Return what is served, one entry per name.

        A model counts as served while any replica serves it: a replica that cannot load it retries by itself.

        Raises:
            EngineUnavailable: no replica has reported recently.
        """
        with self._database.read() as connection:
            expected = {each.id for each in engine_replicas.list_wanted(connection)}
        best: dict[str, DeploymentReport] = {}
        for report in sorted(self._reports(), key=lambda each: rank(each, expected)):
            best[report.name] = report
        return [describe(report) for _, report in sorted(best.items())]

    def served_hashes(self, name: str) -> set[str]:
        """Return the SHA-256 of each file serving a name, computed by replicas before loading."""
        try:
            return {found.sha256 for found in self._reports() if found.name == name and found.status == "serving"}
        except EngineUnavailable:
            return set()

    def remove(self, name: str, deployment: int | None = None) -> None:
        """Return once no replica serves a deployment that is no longer wanted.

        Raises:
            EngineUnavailable: a replica still serves it, or none reports.
            UnknownModel: no replica has it.
        """
        found = [report for report in self._reports() if report.name == name and deployment in (None, report.deployment)]
        if not any(report.status != "failed" for report in found):
            raise UnknownModel(f"no replica serves '{name}'")
        raise EngineUnavailable(f"{pluralize(len(found), 'replica')} of the engine still serve '{name}'")

    def await_serving(self, deployment: Deployment, attempt: int, limit_seconds: float = DEPLOY_SECONDS) -> None:
        """Wait until all live replicas serve a deployment, or it is no longer wanted.

        Raises:
            EngineError: a replica could not load it; the message is that replica's.
            EngineUnavailable: no replica reported for `ABSENT_SECONDS`, or not all were done within the limit.
        """
        started = last_seen = time.monotonic()

        def is_done() -> bool:
            nonlocal last_seen
            with self._database.read() as connection:
                current = find_by_promotion(connection, deployment.promotion)
                replicas = engine_replicas.list_live_replicas(connection)
            if current is None or current.status != "deploying":
                return True
            now = time.monotonic()
            last_seen = now if replicas else last_seen
            if now - last_seen > ABSENT_SECONDS:
                raise no_replicas(f"none for {ABSENT_SECONDS:.0f} s")
            waiting = list_waiting(replicas, deployment.id, attempt)
            if now - started > limit_seconds:
                raise EngineUnavailable(f"not served by all replicas after {limit_seconds:.0f} s: {'; '.join(waiting)}")
            return bool(replicas) and not waiting

        Retrying(retry=retry_if_result(lambda done: not done), wait=wait_fixed(POLL_SECONDS), stop=stop_never)(is_done)

    def _reports(self) -> list[DeploymentReport]:
        with self._database.read() as connection:
            replicas = engine_replicas.list_live_replicas(connection)
        if not replicas:
            raise no_replicas(f"none within {LIVE_SECONDS} s")
        return [DeploymentReport(**found) for replica in replicas for found in replica.report["deployments"]]


def no_replicas(seen: str) -> EngineUnavailable:
    return EngineUnavailable(f"no replica of the engine reports ({seen}): check the pods of the Deployment engine")


def rank(report: DeploymentReport, expected: Collection[int]) -> tuple[bool, int, int]:
    """Return the sort key of reports under one name, the most relevant last.

    A version that was rolled back still answers until the wanted one is loaded: that must not count as a difference.
    """
    return report.deployment in expected, ("failed", "loading", "serving").index(report.status), report.deployment


def describe(report: DeploymentReport) -> Served:
    return Served(
        name=report.name,
        version=report.version,
        deployment=report.deployment,
        path=None,
        sha256=report.sha256,
        status="refused" if report.status == "failed" else report.status,
        reason=report.reason or None,
        loaded_at=report.loaded_at,
        smoke=report.smoke,
    )


def list_waiting(replicas: Sequence[Replica], deployment_id: int, attempt: int) -> list[str]:
    """List the replicas that do not serve a deployment yet, with their state.

    Raises:
        EngineError: one of them could not load it in this attempt.
    """
    waiting = []
    for replica in replicas:
        document = replica.deployment(deployment_id)
        report = DeploymentReport(**document) if document else None
        if report is not None and report.status == "failed" and report.attempt >= attempt:
            raise replica_error(replica.id, report)
        if report is None or report.status != "serving":
            waiting.append(f"{replica.id} {report.reason or report.status if report else 'has not begun'}")
    return waiting


def replica_error(replica: str, report: DeploymentReport) -> EngineError:
    """Return the error that a replica reported."""
    code = report.error_code or EngineError.kind.value
    error = from_refusal(Refusal(error_code=code, message=f"replica {replica}: {report.reason}"))
    # A version that one replica could not load is refused for any reason; a retry needs a new promotion.
    return BadRequest(error.message) if isinstance(error, EngineUnavailable) else error


def list_states(replicas: Sequence[Replica], deployment_id: int) -> list[ReplicaState]:
    """List the state of a deployment in each replica that reports it."""
    found = [(replica.id, replica.deployment(deployment_id)) for replica in replicas]
    return [ReplicaState(replica, each["status"], each["reason"]) for replica, each in found if each is not None]


def open_engine(settings: Settings, database: Database) -> EngineClient | ReplicatedEngine:
    """Open the configured engine."""
    return ReplicatedEngine(database) if settings.engine.mode == "pull" else EngineClient(settings.engine_url)


def hash_finder(settings: Settings, database: Database) -> Callable[[str], tuple[Path | None, str] | None]:
    """Return a function from a model's name to its served file and SHA-256.

    The file is None if it is not on this machine.
    """

    def find(name: str) -> tuple[Path | None, str] | None:
        engine = open_engine(settings, database)
        if isinstance(engine, ReplicatedEngine):
            hashes = engine.served_hashes(name)
            return (None, ", ".join(sorted(hashes))) if hashes else None
        try:
            served = {model.name: model for model in engine.served()}
        except EngineError:
            return None
        model = served.get(name)
        return (model.path, model.sha256) if model and model.status == "serving" else None

    return find
