"""Store the validation of each dataset version: findings, verdicts, and whether the version is blocked."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, select, update

from recipes.contracts.validation_results import Leaks, ValidationFacts
from recipes.storage.manifest import Artifact
from resources.datasets.check_verdicts import Verdict
from resources.metadata.database import Database
from resources.metadata.dataset_problems import clear_problem
from resources.metadata.datasets import DatasetVersion
from resources.metadata.outbox import emit, now_ms
from resources.metadata.tables import dataset_validations as table
from resources.metadata.transactions import insert_into

CHECKED_EVENT = "dataset.checked"
CHECK_REQUESTED_EVENT = "dataset.check_requested"


@dataclass(frozen=True)
class CheckStatus:
    """The status of a version's checks, and why it is blocked.

    `failed` means that no blocking check failed.
    """

    status: Literal["pending", "passed", "failed", "blocked"]
    blocked: str = ""


NOT_CHECKED = CheckStatus("pending")


@dataclass(frozen=True)
class Validation:
    """The newest validation of a version.

    `blocked` says why it may not be split or trained on; empty if it may.
    """

    dataset_id: str
    statistics: Artifact
    facts: ValidationFacts
    leaks: Leaks | None
    verdicts: tuple[Verdict, ...]
    blocked: str
    checked_at: int
    reference: str

    @property
    def standing(self) -> CheckStatus:
        return summarize_verdicts(self.verdicts, self.blocked)


class Validations:
    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, dataset_id: str, connection: Connection) -> Validation | None:
        row = connection.execute(select(table).where(table.c.dataset_id == dataset_id)).mappings().first()
        return parse_validation(row) if row else None

    def standings(self, dataset_ids: Collection[str], connection: Connection) -> Mapping[str, CheckStatus]:
        """Return the status of each of these versions."""
        query = select(table.c.dataset_id, table.c.verdicts, table.c.blocked).where(table.c.dataset_id.in_(dataset_ids))
        checked = {
            row.dataset_id: summarize_verdicts(map(Verdict.model_validate, row.verdicts.values()), row.blocked)
            for row in connection.execute(query)
        }
        return {identifier: checked.get(identifier, NOT_CHECKED) for identifier in dataset_ids}

    def blocked(self, dataset_id: str, connection: Connection) -> str:
        """Return why a version may not be split or trained on.

        Empty if it may, or was not checked yet.
        """
        query = select(table.c.blocked).where(table.c.dataset_id == dataset_id)
        return str(connection.execute(query).scalar() or "")

    def has_split_verdict(self, dataset_id: str, connection: Connection) -> bool:
        """Return whether a version's records and splits have been checked.

        The existence of splits is not enough: a prepared version has them before its check.
        """
        query = select(table.c.leaks.is_not(None)).where(table.c.dataset_id == dataset_id)
        return bool(connection.execute(query).scalar())

    def read_blocked(self, dataset_id: str) -> str:
        """Call `blocked` in a transaction of its own."""
        with self._database.read() as connection:
            return self.blocked(dataset_id, connection)

    def set_version(
        self,
        connection: Connection,
        version: DatasetVersion,
        statistics: Artifact,
        facts: ValidationFacts,
        verdicts: Iterable[Verdict],
    ) -> None:
        """Record the check of a version's records, in the caller's transaction.

        The check of its splits is kept.
        """
        values = {
            "statistics": statistics.model_dump(),
            "facts": facts.model_dump(mode="json"),
            "reference": facts.drift.reference if facts.drift is not None else "",
            "checked_at": now_ms(),
        }
        row = insert_into(connection, table).values(dataset_id=version.id, verdicts={}, blocked="", **values)
        connection.execute(row.on_conflict_do_update(index_elements=["dataset_id"], set_=values))
        clear_problem(connection, version)
        self._add_verdicts(connection, version, verdicts)

    def set_leaks(self, connection: Connection, version: DatasetVersion, leaks: Leaks, verdict: Verdict) -> None:
        """Record the check of a version's splits, in the caller's transaction."""
        values = {"leaks": leaks.model_dump(mode="json"), "checked_at": now_ms()}
        connection.execute(update(table).where(table.c.dataset_id == version.id).values(**values))
        clear_problem(connection, version)
        self._add_verdicts(connection, version, [verdict])

    def _add_verdicts(self, connection: Connection, version: DatasetVersion, verdicts: Iterable[Verdict]) -> None:
        before = self.find(version.id, connection)
        assert before is not None
        known = {verdict.check: verdict for verdict in before.verdicts}
        together = known | {verdict.check: verdict for verdict in verdicts}
        if together == known:
            return
        blocked = blocking_reason(version.reference, together.values())
        stored = {check: verdict.model_dump(mode="json") for check, verdict in together.items()}
        values = {"verdicts": stored, "blocked": blocked}
        connection.execute(update(table).where(table.c.dataset_id == version.id).values(**values))
        facts = {
            "dataset_id": version.id,
            "name": version.name,
            "version": version.version,
            "failed": sorted(check for check, verdict in together.items() if not verdict.passed),
            "blocked": blocked,
        }
        emit(connection, "datasets", CHECKED_EVENT, version.name, facts)


def blocking_reason(reference: str, verdicts: Iterable[Verdict]) -> str:
    """Return why a version is blocked, in one line; empty if it is not."""
    reasons = [f"{verdict.check}: {verdict.sentence}" for verdict in verdicts if verdict.blocks]
    return f"dataset {reference} did not pass its check {'; '.join(reasons)}" if reasons else ""


def summarize_verdicts(verdicts: Iterable[Verdict], blocked: str) -> CheckStatus:
    if blocked:
        return CheckStatus("blocked", blocked)
    return CheckStatus("passed" if all(verdict.passed for verdict in verdicts) else "failed")


def parse_validation(row: Mapping[Any, Any]) -> Validation:
    return Validation(
        dataset_id=row["dataset_id"],
        statistics=Artifact.model_validate(row["statistics"]),
        facts=ValidationFacts.model_validate(row["facts"]),
        leaks=Leaks.model_validate(row["leaks"]) if row["leaks"] is not None else None,
        verdicts=tuple(Verdict.model_validate(verdict) for verdict in row["verdicts"].values()),
        blocked=row["blocked"],
        checked_at=row["checked_at"],
        reference=row["reference"],
    )
