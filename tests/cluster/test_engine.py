"""An engine of two pods responds to each request during promotions, replacements and outages."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.export.gguf import export_gguf
from recipes.storage.artifact_store import hash_file
from resources.errors import ChecksumMismatch
from resources.serving.client import Served
from tests.cluster.cluster import Cluster
from tests.cluster.engine_installation import ENGINE, EngineInstallation
from tests.cluster.installation import ENDS_WITHIN, wait_until
from tests.recipes.tiny_model import make_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.install_slow]

OUTAGE_SECONDS = 30
"""Longer than a replica's report is valid."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Create two models that answer differently."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        export_gguf(make_tiny_model(folder / f"hf-{seed}", seed), folder / f"{seed}.gguf", "F16")
    return [folder / "0.gguf", folder / "1.gguf"]


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster, files: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineInstallation]:
    """Start two replicas with version 1, and a pod that sends requests continuously."""
    with EngineInstallation(cluster, "engine", tmp_path_factory.mktemp("engine")) as installation:
        installation.start_engine()
        deploy(installation, 1, files[0])
        installation.wait_ready()
        installation.start_load()
        yield installation
        print(f"answers by version: {installation.answers()}")


def deploy(installation: EngineInstallation, version: int, file: Path, sha256: str | None = None) -> None:
    uri = installation.deployer.upload(f"keeper/v{version}", file)
    installation.deployer.deploy(version, uri, sha256 or hash_file(file))


def served(installation: EngineInstallation) -> Served:
    (found,) = installation.deployer.engine.served()
    return found


@pytest.mark.requirement("P1")
def test_promotion_fails_no_request(installation: EngineInstallation, files: list[Path]) -> None:
    installation.wait_for_answers(20, "1")
    deploy(installation, 2, files[1])
    installation.wait_for_answers(20, "2")
    assert installation.failures() == []
    assert (served(installation).version, served(installation).sha256) == (2, hash_file(files[1]))


def test_broken_version_is_rolled_back_and_fails_no_request(installation: EngineInstallation, files: list[Path]) -> None:
    before = served(installation).version
    with pytest.raises(ChecksumMismatch, match=r"replica engine-.*: the download has SHA-256"):
        deploy(installation, 9, files[0], sha256="0" * 64)
    installation.wait_for_answers(20)
    assert installation.failures() == []
    assert served(installation).version == before


def test_replacement_of_a_replica_fails_no_request(installation: EngineInstallation) -> None:
    installation.wait_ready()
    name = min(installation.ready_pods())
    installation.cluster.kubectl("delete", "pod", name, f"--namespace={installation.pods}", "--wait=false")
    installation.wait_ready(name)
    installation.wait_gone(name)
    installation.wait_for_answers(20)
    assert installation.failures() == []


def test_outage_of_the_api_fails_no_request(installation: EngineInstallation, files: list[Path]) -> None:
    """A container that restarts meanwhile serves from its cache.

    A version that is promoted afterwards is served.
    """
    installation.wait_ready()
    before = installation.ready_pods()
    installation.kill("api")
    installation.restart_container(min(before))
    wait_until(lambda: installation.ready_pods() == before, ENDS_WITHIN, installation.describe_engine)
    ends = time.monotonic() + OUTAGE_SECONDS
    while time.monotonic() < ends:
        installation.wait_for_answers(5)
        assert installation.ready_pods() == before
    installation.start("api")
    wait_until(installation.is_ready, ENDS_WITHIN, lambda: installation.log("api"))
    installation.wait_ready()
    deploy(installation, 3, files[0])
    installation.wait_for_answers(20, "3")
    assert installation.failures() == []


def test_rolling_update_of_the_engine_fails_no_request(installation: EngineInstallation) -> None:
    installation.wait_ready()
    before = installation.ready_pods()
    installation.cluster.kubectl("rollout", "restart", f"deployment/{ENGINE}", f"--namespace={installation.pods}")
    installation.wait_ready(*before)
    installation.wait_gone(*before)
    installation.wait_for_answers(20)
    assert installation.failures() == []
