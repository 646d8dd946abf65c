"""Persisted deployments of a gateway: they survive it and belong to it alone."""

from pathlib import Path

import pytest

from recipes.contracts.job import BadConfiguration
from resources.serving.client import DeployRequest
from resources.serving.deployment_table import DeploymentState


def test_deployment_state_persists_and_is_exclusive_to_one_gateway(tmp_path: Path) -> None:
    asked = (DeployRequest(name="keeper", version=1, path=tmp_path / "model.gguf", sha256="a" * 64),)
    state = DeploymentState(tmp_path / "state")
    assert state.read() == ()
    state.write(asked)
    with pytest.raises(BadConfiguration, match=r"another gateway uses .*: end it, or give another --state-dir"):
        DeploymentState(tmp_path / "state")
    del state
    assert DeploymentState(tmp_path / "state").read() == asked


@pytest.mark.parametrize("left", [b"", b'[{"name": "keeper"', b'[{"name": "keeper"}]'])
def test_broken_state_file_is_named_with_a_remedy(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "deployments.json").write_bytes(left)
    with pytest.raises(BadConfiguration, match=r"deployments\.json is broken: delete it to start without deployments"):
        DeploymentState(tmp_path).read()
