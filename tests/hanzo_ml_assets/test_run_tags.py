"""A run uses the version that it was launched for.

Another organization may have one with the same name and number.
"""

import time

import dagster as dg
import pytest

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.datasets import SPLITS
from hanzo_ml_assets.definitions import definitions
from recipes.storage.manifest import canonical_json
from resources.ingest.version_creation import create_version
from sensors.retry_dead_runs import SETTLING_TIME, retry_dead_runs
from sensors.split_new_versions import split_new_versions
from sensors.start_submitted_jobs import failed_split
from tests.recipes.preparation.preparation_workspace import questions
from tests.support.assets.control_plane import plane

__all__ = ["plane"]


@pytest.mark.slow
def test_versions_of_two_organizations_with_one_name_are_split_separately(plane: ControlPlane) -> None:
    raw = plane.settings.home / "other.jsonl"
    raw.write_bytes(b"".join(canonical_json({**row, "of": "acme"}) + b"\n" for row in questions(40)))
    for name in ("d", "ellarin"):
        create_version(plane.database, plane.store, name=name, path=raw, user="u", organization="acme")
    found = definitions()
    job = found.resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance=instance, repository_def=found.get_repository_def())
        asked = split_new_versions.on(plane)(context)
        assert isinstance(asked, dg.SensorResult)
        requests = asked.run_requests or []
        assert [request.tags["hanzo_ml/dataset_version"] for request in requests] == ["d@1", "d@1", "ellarin@1"]
        assert [request.tags["hanzo_ml/organization"] for request in requests] == ["default", "acme", "acme"]
        for request in requests:
            steps = [dg.AssetKey(["datasets", "sandbox", step]) for step in ("version", *SPLITS)]
            assert request.asset_selection == steps
            assert job.execute_in_process(instance=instance, asset_selection=steps, tags=dict(request.tags)).success
        ours, theirs = (plane.datasets.read("d@1", organization) for organization in ("default", "acme"))
        assert [sum(split["num_records"] for split in version.splits.values()) for version in (ours, theirs)] == [60, 40]
        # A failed run of one does not fail jobs on the other.
        failed = instance.create_run_for_job(job, tags={**requests[1].tags, "dagster/failure_reason": "STEP_FAILURE"})
        instance.report_run_failed(failed)
        assert failed_split(instance, theirs) is None, "nobody has looked at it yet, and it may be tried again"
        time.sleep(SETTLING_TIME.total_seconds() + 0.1)
        retried = retry_dead_runs.on(plane)(dg.build_sensor_context(instance=instance))
        assert isinstance(retried, dg.SensorResult) and not retried.run_requests
        assert failed_split(instance, theirs) == failed.run_id
        assert failed_split(instance, ours) is None
