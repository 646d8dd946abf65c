"""The Dagster instance of the embedded stack, created and migrated before anything opens it.

Uses Dagster's command line, because importing Dagster costs a second and 100 MB.
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
    """How an instance was prepared, stored with the storage itself."""

    def read(self) -> Mapping[str, Any]: ...

    def write(self, document: Mapping[str, Any]) -> None: ...


def migrate_dagster(settings: Settings, console: Console) -> None:
    """Create and migrate the instance once, before any process opens it.

    Sixteen processes that created it concurrently broke it (dagster #27390). Its storage is in the metadata database if that
    is PostgreSQL, else in the state folder. An existing history stays in its place: copying would have to renumber all
    events, which other rows refer to.

    Raises:
        BadConfiguration: the instance cannot be created; the message says why.
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
            f"  Dagster's history stays in {existing_history}: to start a new one in PostgreSQL, stop everything and move "
            "that folder away"
        )
        console.print(line, soft_wrap=True)
    refuse_unreadable_address(home)
    prepare_instance(settings, sqlite_storage_config(home), MarkerFile(home / "migrated.json"), console, ("migrate",))


def refuse_unreadable_address(home: Path) -> None:
    """Raise BadConfiguration for a path that Dagster's SQLite storage would misread as URL syntax."""
    if found := re.search(r"\?|%[0-9A-Fa-f]{2}", str(home)):
        raise BadConfiguration(
            f"the state folder {home.parent} has {found[0]!r} in its path, which Dagster reads as part of a URL: "
            "set HANZO_ML_HOME to another folder"
        )


def prepare_instance(
    settings: Settings, storage: dict[str, Any], note: PreparationRecord, console: Console, commands: Sequence[str]
) -> None:
    """Write dagster.yaml, and run Dagster's `commands` unless the storage is up to date."""
    home, max_parallel_jobs = settings.dagster_home, max_running_jobs(settings.scheduler)
    config = render_instance_config((SOURCE / DAGSTER_FILE).read_text(encoding="utf-8"), storage, max_parallel_jobs)
    if settings.scheduler.backend == KUBERNETES:
        config |= kubernetes_instance(settings)
    # Atomic, because `up` may be called on a running stack, whose processes read this file when they start.
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
    """Migrate through an instance with this storage only.

    A run launcher would require a Kubernetes token, which few pods have.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone = {key: config[key] for key in ("storage", "telemetry")}
        (Path(folder) / "dagster.yaml").write_text(yaml.safe_dump(alone), encoding="utf-8")
        for command in commands:
            run_instance_command(settings, command, home=Path(folder))


def is_later(recorded: str | None, own: Any) -> bool:
    """Whether a later release prepared the storage: during an update, pods of both releases run."""
    return recorded is not None and Version(recorded) > Version(str(own))


@dataclass(frozen=True)
class MarkerFile:
    """The preparation record of an instance in a folder."""

    path: Path

    def read(self) -> Mapping[str, Any]:
        recorded = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        return {"dagster": recorded} if isinstance(recorded, str) else dict(recorded)  # str: written by older releases

    def write(self, document: Mapping[str, Any]) -> None:
        write_json_atomic(self.path, document)


def sqlite_storage_config(home: Path) -> dict[str, Any]:
    """Return the storage section of `dagster.yaml` for one machine."""
    return {
        "module": "resources.dagster_storage",
        "class": "KeptSqliteStorage",
        "config": {"base_dir": str(home)},
    }


def postgres_storage_config(name: str) -> dict[str, Any]:
    """Return the storage section of `dagster.yaml` for a cluster."""
    return {"module": "resources.dagster_postgres_storage", "class": "OwnSchemaStorage", "config": {"schema": name}}


def render_instance_config(text: str, storage: dict[str, Any], max_parallel_jobs: int) -> dict[str, Any]:
    """Return `dagster.yaml` with this storage and a limit of parallel jobs.

    Runs of other assets need slots in addition to the jobs'.
    """
    document: dict[str, Any] = yaml.safe_load(text)
    document["storage"] = {"custom": storage}
    document["concurrency"]["runs"]["max_concurrent_runs"] += max_parallel_jobs - 1
    return document


def run_instance_command(settings: Settings, *arguments: str, home: Path | None = None) -> None:
    """Run `dagster instance`; `home` overrides the folder of dagster.yaml."""
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
