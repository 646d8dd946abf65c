"""Ownership of stored files: determined by their path, or none."""

from resources.metadata.database import Database
from resources.metadata.ownership import file_organization
from resources.metadata.tracking.tracking import Tracking


def test_organization_of_a_file_follows_from_its_uri(database: Database) -> None:
    tracking = Tracking(database)
    experiment = tracking.experiments.ensure("e", "acme & co")
    tracking.runs.create(experiment.id, run_id="r")
    model = tracking.logged_models.create(experiment.id).model.id
    own = {
        "hanzo-ml/runs/r/artifacts/f",
        "hanzo-ml/checkpoints/r/step-1/f",
        f"hanzo-ml/runs/{model}/artifacts/f",
        "hanzo-ml/artifacts/@acme%20%26%20co/free/f",
        "hanzo-models/@acme%20%26%20co/m/1/f",
    }
    assert {file_organization(database, f"s3://{place}") for place in own} == {"acme & co"}
    assert file_organization(database, "s3://hanzo-models/m/1/f") == "default"
    for nobodys in ("hanzo-ml/runs/gone/artifacts/f", "hanzo-ml", "hanzo-models", "elsewhere/f"):
        assert file_organization(database, f"s3://{nobodys}") == ""
