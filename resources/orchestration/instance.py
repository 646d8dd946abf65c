"""Dagster's instance of the embedded stack, made and brought to this release before anything opens it.

By Dagster's own command: to import Dagster costs a second and 100 MB.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import yaml
from packaging.version import Version
from rich.console import Console

from recipes.contracts.job import BadConfiguration
from resources.compute.local.capacity import GPU_POOL, max_running_jobs
from resources.installation import DAGSTER_FILE, SOURCE
from resources.orchestration.kubernetes_instance import KUBERNETES, kubernetes_instance
from resources.orchestration.postgres_schema import is_postgresql, locked_schema
from resources.settings.settings import Settings
from resources.stack.detached_process import write_atomic, write_json_atomic
from resources.stack.services import service_environment


class PreparationRecord(Protocol):
    """What was done to prepare an instance, kept beside its storage."""

    def read(self) -> Mapping[str, Any]: ...

    def write(self, document: Mapping[str, Any]) -> None: ...


def migrate_dagster(settings: Settings, console: Console) -> None:
    """Make the instance once, before anything else opens it: sixteen processes that did it at once broke it (#27390).

    Its storage is in the metadata database where that is PostgreSQL, and else in the state folder. What was begun there
    stays there, whole: a copy would have to number all events anew, by which other rows know them.

    Raises:
        BadConfiguration: it can't be made; the message says why.
    """
    home = settings.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    existing_history = home / "history"
    if is_postgresql(settings) and not existing_history.exists():
        with locked_schema(settings) as schema:
            prepare_instance(settings, postgres_storage_config(schema.name), schema, console, ("migrate", "reindex"))
        return
    if is_postgresql(settings):
        line = (
            f"  Dagster's history stays in {existing_history}: move that away while nothing runs, and a new one "
            "begins in PostgreSQL"
        )
        console.print(line, soft_wrap=True)
    refuse_unreadable_address(home)
    prepare_instance(settings, sqlite_storage_config(home), MarkerFile(home / "migrated.json"), console, ("migrate",))


def refuse_unreadable_address(home: Path) -> None:
    """Raises BadConfiguration of a path that Dagster's SQLite storage, which puts it into an address, would not find."""
    if found := re.search(r"\?|%[0-9A-Fa-f]{2}", str(home)):
        raise BadConfiguration(
            f"the state folder {home.parent} has {found[0]!r} in its path, which Dagster reads as part of an address: "
            "set HANZO_ML_HOME to another folder"
        )


def prepare_instance(
    settings: Settings, storage: dict[str, Any], note: PreparationRecord, console: Console, commands: Sequence[str]
) -> None:
    """Configure the instance, and let Dagster's own `commands` bring its storage to this release unless it is there."""
    home, max_parallel_jobs = settings.dagster_home, max_running_jobs(settings.scheduler)
    config = render_instance_config((SOURCE / DAGSTER_FILE).read_text(encoding="utf-8"), storage, max_parallel_jobs)
    if settings.scheduler.backend == KUBERNETES:
        config |= kubernetes_instance(settings)
    # Whole at any moment: `up` is called on a stack that runs, whose processes read it as they start.
    write_atomic(home / "dagster.yaml", yaml.safe_dump(config, sort_keys=False))
    expected = {"dagster": version("dagster"), GPU_POOL: max_parallel_jobs}
    recorded = note.read()
    if recorded == expected or is_later(recorded.get("dagster"), expected["dagster"]):
        return
    with console.status("preparing the Dagster instance"):
        if recorded.get("dagster") != expected["dagster"]:
            migrate_storage(settings, config, commands)
        limited = settings.scheduler.backend != KUBERNETES
        if limited and recorded.get(GPU_POOL, 1) != max_parallel_jobs:  # dagster.yaml has 1
            run_instance_command(settings, "concurrency", "set", GPU_POOL, str(max_parallel_jobs))
    note.write(expected)


def migrate_storage(settings: Settings, config: Mapping[str, Any], commands: Sequence[str]) -> None:
    """By an instance with nothing but this storage: a run launcher would want a token of Kubernetes, which few pods have."""
    with tempfile.TemporaryDirectory() as folder:
        alone = {key: config[key] for key in ("storage", "telemetry")}
        (Path(folder) / "dagster.yaml").write_text(yaml.safe_dump(alone), encoding="utf-8")
        for command in commands:
            run_instance_command(settings, command, home=Path(folder))


def is_later(recorded: str | None, own: Any) -> bool:
    """Whether a later release prepared the storage: pods of both run while one replaces the other."""
    return recorded is not None and Version(recorded) > Version(str(own))


@dataclass(frozen=True)
class MarkerFile:
    """The note of an instance in a folder."""

    path: Path

    def read(self) -> Mapping[str, Any]:
        recorded = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        return {"dagster": recorded} if isinstance(recorded, str) else dict(recorded)  # of a release before this one

    def write(self, document: Mapping[str, Any]) -> None:
        write_json_atomic(self.path, document)


def sqlite_storage_config(home: Path) -> dict[str, Any]:
    """The storage of a laptop, as `dagster.yaml` has it."""
    return {
        "module": "resources.dagster_storage",
        "class": "KeptSqliteStorage",
        "config": {"base_dir": str(home)},
    }


def postgres_storage_config(name: str) -> dict[str, Any]:
    """The storage of a cluster."""
    return {"module": "resources.dagster_postgres_storage", "class": "OwnSchemaStorage", "config": {"schema": name}}


def render_instance_config(text: str, storage: dict[str, Any], max_parallel_jobs: int) -> dict[str, Any]:
    """`dagster.yaml` of an instance with that storage, where so many jobs run at the same time: what they wait for must find
    room beside them.
    """
    document: dict[str, Any] = yaml.safe_load(text)
    document["storage"] = {"custom": storage}
    document["concurrency"]["runs"]["max_concurrent_runs"] += max_parallel_jobs - 1
    return document


def run_instance_command(settings: Settings, *arguments: str, home: Path | None = None) -> None:
    """`home` is the folder of dagster.yaml, if it is another than the instance's own."""
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "instance", *arguments],
        env={**os.environ, **service_environment(settings), **({"DAGSTER_HOME": str(home)} if home else {})},
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise BadConfiguration(f"the Dagster instance in {settings.dagster_home} can't be prepared: {reason}")
