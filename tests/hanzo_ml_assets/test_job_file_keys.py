"""Every key of the specification's job file changes the objects, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hanzo_ml_assets.dry_run.command import dry_run
from recipes.contracts.job import BadConfiguration
from resources.errors import HanzoError
from tests.support.api.command_job import SPECIFICATION

pytestmark = pytest.mark.requirement("G2")

RECORDED = {"name", "type"}
"""Only in the job's record: tests/api/routes/v1/test_command_jobs.py."""
OTHER_VALUES: dict[str, Any] = {
    "image": "hanzoai/other:1",
    "command": ["torchrun", "other.py"],
    "env.HANZO_ML_TRACKING_URI": "http://other:8057",
    "env.HANZO_ML_EXPERIMENT": "other",
    "resources.gpus": 4,
    "resources.gpu_type": "nvidia-h100-80gb",
    "resources.memory": "256Gi",
    "resources.cpu": 32,
    "distributed.strategy": "ddp",
    "distributed.num_nodes": 2,
    "distributed.gpus_per_node": 4,
    "distributed.backend": "gloo",
    "distributed.gang_scheduling": False,
    "distributed.rdma": "enabled",
    "storage.datasets": "s3://hanzo-ml/datasets/other/1/",
    "storage.checkpoints": "s3://hanzo-ml/checkpoints/other/",
    "schedule.max_duration": "24h",
    "schedule.checkpoint_interval": "2h",
    "schedule.preemptible": True,
    "schedule.priority": "production",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path))


def render(document: dict[str, Any]) -> str:
    try:
        return dry_run(document)
    except (BadConfiguration, HanzoError) as refused:
        return f"refused: {refused}"


def test_every_key_of_the_specified_job_file_is_covered() -> None:
    written = {
        f"{key}.{nested}" if isinstance(value, dict) else key
        for key, value in yaml.safe_load(SPECIFICATION).items()
        for nested in (value if isinstance(value, dict) else [""])
    }
    assert written <= OTHER_VALUES.keys() | RECORDED


@pytest.mark.parametrize(("path", "value"), OTHER_VALUES.items(), ids=OTHER_VALUES)
def test_changed_value_of_a_key_changes_the_objects_or_is_refused_by_name(path: str, value: Any) -> None:
    document = yaml.safe_load(SPECIFICATION)
    before = render(document)
    assert before.startswith("# hanzo-ml job submit --dry-run")
    section, _, key = path.rpartition(".")
    (document.setdefault(section, {}) if section else document)[key] = value
    after = render(document)
    assert after != before
    assert not after.startswith("refused") or key in after, after
