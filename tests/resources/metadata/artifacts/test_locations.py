"""Artifact locations: URIs as MLflow's `append_to_uri_path` builds them, and refused paths."""

import pytest

from resources.errors import HanzoError
from resources.metadata.artifacts.locations import (
    absolute_location,
    checked_location,
    is_proxied,
    model_files_uri,
    run_files_uri,
)


@pytest.mark.parametrize(
    ("location", "files"),
    [
        ("mlflow-artifacts:/3", "mlflow-artifacts:/3/RUN/artifacts"),
        ("mlflow-artifacts:/team/a/", "mlflow-artifacts:/team/a/RUN/artifacts"),
        ("mlflow-artifacts:/", "mlflow-artifacts:/RUN/artifacts"),
        ("mlflow-artifacts:", "mlflow-artifacts:/RUN/artifacts"),
        ("s3://bucket/a", "s3://bucket/a/RUN/artifacts"),
        ("s3://bucket/a/?versionId=1", "s3://bucket/a/RUN/artifacts?versionId=1"),
        ("gs://bucket", "gs://bucket/RUN/artifacts"),
        ("file:/tmp/x", "file:///tmp/x/RUN/artifacts"),
        ("/tmp/x/", "/tmp/x/RUN/artifacts"),
        ("dbfs:/x", "dbfs:/x/RUN/artifacts"),
        ("wasbs://c@a.example/x", "wasbs://c@a.example/x/RUN/artifacts"),
    ],
)
def test_run_and_model_files_are_located_by_scheme(location: str, files: str) -> None:
    assert run_files_uri(location, "RUN") == files
    assert model_files_uri(location, "m-1") == files.replace("RUN", "models/m-1")
    assert is_proxied(files) is location.startswith("mlflow-artifacts:")


@pytest.mark.parametrize("location", ["", "s3://bucket/a", "s3://hanzo-ml-checkpoints/a", "/tmp/x", "mlflow-artifacts:/7a"])
def test_allowed_location_is_kept_unchanged(location: str) -> None:
    assert checked_location(location) == location


@pytest.mark.parametrize(
    "location",
    [
        "a/b",
        "file:a/b",
        "file:",
        "mlflow-artifacts:/7",
        "mlflow-artifacts:/models/x",
        "mlflow-artifacts:/a//b",
        "mlflow-artifacts:/a?b",
        "mlflow-artifacts:/%61",
        "mlflow-artifacts://host",
        "ftp://h/x",
        "s3://hanzo-ml",
        "s3://b/x?%2e%2e",
        "s3://b\x00",
    ],
)
def test_location_that_a_client_may_not_choose_is_refused(location: str) -> None:
    with pytest.raises(HanzoError):
        checked_location(location)


def test_relative_path_is_resolved_against_the_folder() -> None:
    assert absolute_location("a/b", "/srv") == "/srv/a/b"
    assert absolute_location("file:a/b?c=d", "/srv") == "file:///srv/a/b?c=d"
    for location in ("", "/a", "s3://b", "file:/a", "file:///a", "dbfs:/a"):
        assert absolute_location(location, "/srv") == location
