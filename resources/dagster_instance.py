"""Dagster's instance of the embedded stack, made and brought to this release before anything opens it.

By Dagster's own command: to import Dagster costs a second and 100 MB.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml
from rich.console import Console

from recipes.schema import BadConfiguration
from resources.compute.devices import POOL, jobs_at_once
from resources.detached import write_json, write_whole
from resources.services import SOURCE, environment
from resources.settings import Settings


def migrate_dagster(settings: Settings, console: Console) -> None:
    """Make the instance once, before anything else opens it: sixteen processes that did it at once broke it (#27390)."""
    home = settings.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    at_once = jobs_at_once(settings.scheduler)
    # Whole at any moment: `up` is called on a stack that runs, whose processes read it as they start.
    write_whole(home / "dagster.yaml", instance_configuration((SOURCE / "dagster.yaml").read_text(), home, at_once))
    marker = home / "migrated.json"
    wanted = {"dagster": version("dagster"), POOL: at_once}
    known = json.loads(marker.read_text()) if marker.is_file() else {}
    if isinstance(known, str):  # of a release before this one
        known = {"dagster": known}
    if known == wanted:
        return
    with console.status("preparing the Dagster instance"):
        if known.get("dagster") != wanted["dagster"]:
            change_instance(settings, "migrate")
        if known.get(POOL, 1) != at_once:  # dagster.yaml has 1
            change_instance(settings, "concurrency", "set", POOL, str(at_once))
    write_json(marker, wanted)


def instance_configuration(text: str, home: Path, at_once: int) -> str:
    """`dagster.yaml` of an instance in `home` where that many jobs run at the same time: what they wait for must find room
    beside them.
    """
    document = yaml.safe_load(text)
    kept = {"module": "resources.dagster_storage", "class": "KeptSqliteStorage", "config": {"base_dir": str(home)}}
    document["storage"] = {"custom": kept}
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
