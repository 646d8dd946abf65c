"""Dagster's instance of the embedded stack, made and brought to this release before anything opens it.

By Dagster's own command: to import Dagster costs a second and 100 MB.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import yaml
from rich.console import Console

from recipes.contracts.job import BadConfiguration
from resources.compute.local.capacity import GPU_POOL, max_running_jobs
from resources.detached import write_json, write_whole
from resources.orchestration.postgres_schema import is_postgresql, own_schema
from resources.settings.settings import Settings
from resources.stack.services import SOURCE, environment


class Note(Protocol):
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
    begun = home / "history"
    if is_postgresql(settings) and not begun.exists():
        with own_schema(settings) as schema:
            prepare(settings, in_schema(schema.name), schema, console, ("migrate", "reindex"))
        return
    if is_postgresql(settings):
        line = f"  Dagster's history stays in {begun}: move that away while nothing runs, and a new one begins in PostgreSQL"
        console.print(line, soft_wrap=True)
    prepare(settings, in_folder(home), MarkerFile(home / "migrated.json"), console, ("migrate",))


def prepare(settings: Settings, storage: dict[str, Any], note: Note, console: Console, commands: Sequence[str]) -> None:
    """Configure the instance, and let Dagster's own `commands` bring its storage to this release unless it is there."""
    home, at_once = settings.dagster_home, max_running_jobs(settings.scheduler)
    # Whole at any moment: `up` is called on a stack that runs, whose processes read it as they start.
    write_whole(home / "dagster.yaml", instance_configuration((SOURCE / "dagster.yaml").read_text(), storage, at_once))
    wanted = {"dagster": version("dagster"), GPU_POOL: at_once}
    known = note.read()
    if known == wanted:
        return
    with console.status("preparing the Dagster instance"):
        if known.get("dagster") != wanted["dagster"]:
            for command in commands:
                change_instance(settings, command)
        if known.get(GPU_POOL, 1) != at_once:  # dagster.yaml has 1
            change_instance(settings, "concurrency", "set", GPU_POOL, str(at_once))
    note.write(wanted)


@dataclass(frozen=True)
class MarkerFile:
    """The note of an instance in a folder."""

    path: Path

    def read(self) -> Mapping[str, Any]:
        known = json.loads(self.path.read_text()) if self.path.is_file() else {}
        return {"dagster": known} if isinstance(known, str) else dict(known)  # of a release before this one

    def write(self, document: Mapping[str, Any]) -> None:
        write_json(self.path, document)


def in_folder(home: Path) -> dict[str, Any]:
    """The storage of a laptop, as `dagster.yaml` has it."""
    return {
        "module": "resources.orchestration.sqlite_storage",
        "class": "KeptSqliteStorage",
        "config": {"base_dir": str(home)},
    }


def in_schema(name: str) -> dict[str, Any]:
    """The storage of a cluster."""
    return {"module": "resources.orchestration.postgres_storage", "class": "OwnSchemaStorage", "config": {"schema": name}}


def instance_configuration(text: str, storage: dict[str, Any], at_once: int) -> str:
    """`dagster.yaml` of an instance with that storage, where so many jobs run at the same time: what they wait for must find
    room beside them.
    """
    document = yaml.safe_load(text)
    document["storage"] = {"custom": storage}
    document["concurrency"]["runs"]["max_concurrent_runs"] += at_once - 1
    return yaml.safe_dump(document, sort_keys=False)


def change_instance(settings: Settings, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "instance", *arguments],
        env={**os.environ, **environment(settings)},
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        home, reason = settings.dagster_home, done.stderr.strip().splitlines()[-1]
        raise BadConfiguration(f"the Dagster instance in {home} can't be prepared: {reason}")
