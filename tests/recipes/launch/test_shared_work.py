"""Pods sharing a preparation through the store restart independently within one attempt."""

from pathlib import Path

import pytest

from recipes.contracts.exit_reason import ExitReason
from recipes.contracts.job import Result
from tests.recipes.launch.launched_gang import LONG, ClusterJob, LaunchedGang
from tests.recipes.preparation.preparation_workspace import Place
from tests.support.recipes.mixed_records import mixed
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

PODS = 2


def test_pod_that_restarts_alone_joins_the_attempt_of_the_others(tmp_path: Path) -> None:
    place = Place(tmp_path / "place", mixed(400))
    with ServerProcess(tmp_path) as server:
        cluster_job = ClusterJob(place.job({}).model_copy(update={"pods": PODS}), server)
        gang = LaunchedGang(cluster_job, tmp_path / "pods", nodes=PODS)
        try:
            gang.wait_for(lambda: len(cluster_job.attempts()) == 1 and None not in cluster_job.attempts()[0].nodes)
            gang.kill_launcher(1)
            assert gang.pods[1].wait(LONG) == -9
            gang.pods[1] = gang.start(1)
            assert gang.wait() == [0, 0], gang.describe()
        finally:
            gang.kill_all()
        (attempt,) = cluster_job.attempts()
        assert (attempt.reason, attempt.nodes) == (ExitReason.COMPLETED, ["machine-0", "machine-1"])
        result = Result.model_validate_json(place.store.get_bytes(cluster_job.job.result_uri))
        assert result.work_digest == cluster_job.job.work_digest
