"""Faults reported by users of other systems.

These are pods deleted while they wait, volumes that hold a pod, and broken watches.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.compute.base import Phase
from tests.cluster.api_server_proxy import CUT, GONE, SILENT, VERSIONLESS, ApiServerProxy
from tests.cluster.cluster import Cluster
from tests.cluster.command_jobs import GREET, objects, submit
from tests.cluster.installation import Installation, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

MIRRORS = 5
"""Kinds that the controller watches."""
NOWHERE = {"node_selector": {"example.com/rack": "nowhere"}}
TWO_NODES = {"num_nodes": 2, "gpus_per_node": 1, "backend": "gloo"}


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[ApiServerProxy]:
    with ApiServerProxy(cluster.kubeconfig, cluster.address) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster, proxy: ApiServerProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Start an installation whose controller reaches the API server through the proxy."""
    folder = tmp_path_factory.mktemp("installation")
    kubeconfig = folder / "proxy.kubeconfig"
    proxy.write_kubeconfig(kubeconfig)
    with Installation(cluster, "reports", folder, scheduler={"kubeconfig": str(kubeconfig)}) as installation:
        yield installation


def test_pod_deleted_while_it_waits_for_a_node_is_noticed_and_named(installation: Installation) -> None:
    job = submit(installation, GREET, gpus=0, distributed=TWO_NODES, pod=NOWHERE)
    wait_until(lambda: "no node for pod" in installation.observe(job).detail, 60, lambda: installation.describe(job))
    pods = sorted(name.removeprefix("Pod/") for name in objects(installation, job) if name.startswith("Pod/"))
    installation.cluster.kubectl("delete", "pod", pods[1], f"--namespace={installation.name}")
    named = f"pod {pods[1]} was deleted before it started; no node for pod "
    wait_until(lambda: installation.observe(job).detail.startswith(named), 60, lambda: installation.describe(job))
    installation.compute.cancel(job)
    installation.wait_for(job, Phase.FAILED)


def test_unmountable_volume_is_named_and_the_job_continues_once_it_is_mounted(
    installation: Installation, tmp_path: Path
) -> None:
    folder = tmp_path / "missing"
    volume = f"missing-{installation.name}"
    access = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    installation.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {**access, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder), "type": "Directory"}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "missing", "namespace": installation.name},
            "spec": {**access, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    try:
        job = submit(installation, GREET, gpus=0, pod={"volumes": [{"claim": "missing", "path": "/data"}]})
        words = "hostPath type check failed"
        wait_until(lambda: words in installation.observe(job).detail, 90, lambda: installation.describe(job))
        seen = installation.observe(job)
        assert seen.phase is Phase.STARTING and "image" not in seen.detail
        folder.mkdir()
        installation.wait_for(job, Phase.SUCCEEDED)
    finally:
        installation.cluster.kubectl("delete", "persistentvolume", volume, "--wait=false")


@pytest.mark.parametrize("faults", [{CUT}, {GONE}, {GONE, VERSIONLESS}], ids=["cut", "gone", "versionless"])
def test_job_survives_broken_watches_and_lists(installation: Installation, proxy: ApiServerProxy, faults: set[str]) -> None:
    job = submit(installation, GREET, gpus=0)
    break_watches(installation, proxy, faults, 2 * MIRRORS)
    installation.wait_for(job, Phase.SUCCEEDED)


def test_silent_watches_are_noticed(installation: Installation, proxy: ApiServerProxy) -> None:
    break_watches(installation, proxy, {SILENT}, MIRRORS)
    installation.wait_for(submit(installation, GREET, gpus=0), Phase.SUCCEEDED)


def break_watches(installation: Installation, proxy: ApiServerProxy, faults: set[str], times: int) -> None:
    """Wait until so many requests failed; a watch silent by then stays silent."""
    wanted, proxy.faults = proxy.faults_served + times, frozenset(faults)
    try:
        wait_until(lambda: proxy.faults_served >= wanted, 90, lambda: installation.log("controller"))
    finally:
        proxy.faults = frozenset()
