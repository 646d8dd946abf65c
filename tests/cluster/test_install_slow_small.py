"""`kubectl apply -k deploy/kubernetes/overlays/small`: everything in one pod."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from rich.console import Console

from deploy.demo_cluster import wait_for_api
from tests.cluster.cluster import Cluster
from tests.cluster.demo_installation import DemoInstallation
from tests.deploy.kustomization import KUBERNETES

pytestmark = [pytest.mark.cluster, pytest.mark.install_slow]


@pytest.fixture
def small(cluster: Cluster, tmp_path: Path) -> Iterator[DemoInstallation]:
    """Start one pod, with PostgreSQL and object store outside of the cluster."""
    s3, postgres = cluster.s3, cluster.postgres
    keys = {
        "database-url": postgres.create_database(f"small_{uuid4().hex[:6]}"),
        "storage-access-key": s3.access_key,
        "storage-secret-key": s3.secret_key,
    }
    with DemoInstallation(cluster, tmp_path, KUBERNETES / "overlays" / "small", keys) as installation:
        installation.write_overlay({"storage": {"endpoint": s3.url, "encryption": "none"}})
        yield installation


@pytest.mark.requirement("A5", "Z3")
def test_small_installation_is_one_ready_pod(small: DemoInstallation) -> None:
    small.demo.apply(Console())
    small.demo.wait_until_ready(Console())
    [pod] = small.pods("hanzo-ml")
    states = {status["name"]: status for status in pod["status"]["containerStatuses"]}
    assert set(states) == {"api", "code-server", "dagster-daemon", "dagster-webserver", "controller", "engine"}
    assert not [name for name, status in states.items() if status["restartCount"]]
    with small.demo.connected(("hanzo-ml", 8057)) as [api]:
        wait_for_api(api)
        assert httpx.get(f"{api}/v1/jobs", trust_env=False).status_code == 401
