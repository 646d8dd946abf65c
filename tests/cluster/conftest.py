"""Tests on a real cluster: marked `cluster`, and run in its network namespace."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the cluster of this checkout, starting it if needed.

    These tests and all they start are in its network.
    """
    cluster = Cluster()
    started_here = not cluster.is_running()
    if started_here:
        cluster.up()
    try:
        with cluster.entered():
            yield cluster
    finally:
        if started_here:
            cluster.down()
