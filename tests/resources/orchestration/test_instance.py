"""Dagster instance: created once, with a configuration that is complete at any moment."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from recipes.contracts.job import BadConfiguration
from resources.compute.local.capacity import GPU_POOL, max_running_jobs
from resources.orchestration.instance import migrate_dagster
from resources.settings.settings import Settings


def test_configuration_is_replaced_atomically(tmp_path: Path) -> None:
    """Regression: a daemon that read the file between truncation and write used another configuration."""
    settings = Settings(home=tmp_path)
    settings.dagster_home.mkdir()
    known = {"dagster": version("dagster"), GPU_POOL: max_running_jobs(settings.scheduler)}
    (settings.dagster_home / "migrated.json").write_text(json.dumps(known))
    file = settings.dagster_home / "dagster.yaml"
    file.write_text("as: it was\n")
    with file.open() as reader:
        migrate_dagster(settings, Console())
        assert reader.read() == "as: it was\n"
    assert "run_launcher" in file.read_text()


@pytest.mark.parametrize("name", ["a%2Fb", "what?"])
def test_state_folder_unusable_by_dagster_is_refused_by_name(tmp_path: Path, name: str) -> None:
    settings = Settings.load({"HANZO_ML_HOME": str(tmp_path / name)})
    with pytest.raises(BadConfiguration, match="set HANZO_ML_HOME to another folder"):
        migrate_dagster(settings, Console())
