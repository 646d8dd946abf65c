"""Known attacks on the sources of model versions, on a folder and on S3.

A source is refused that would have this server read its own disk, another location in the store or another host.
CVE-2023-2356, 2023-6977, 2024-1483, 2024-3848, 2025-11201, 2026-2614.
"""

import httpx
import pytest

from tests.api.artifact_server import PROXY, ArtifactServer
from tests.support.s3_server import BUCKETS, S3Request, S3Server
from tests.support.server_process import ServerProcess

API = "/api/2.0/mlflow"
LOCAL = "To use a local path as a model version source"
RELATIVE = "If supplying a source as an http, https, local file path"
NOT_CONTAINED = "request parameter must identify the resource that contains the source"
ABSENT = "There is nothing at that place"


REFUSED_SOURCES = [
    ("/etc/passwd", LOCAL),
    ("path/to/model", LOCAL),
    ("C:\\models", LOCAL),
    ("file:///etc/passwd", LOCAL),
    ("FILE:/etc/passwd", LOCAL),
    ("file:///proc/self/root/etc/passwd", LOCAL),
    ("//proc/self/root", LOCAL),
    ("mlflow-artifacts:/0/RUN/artifacts/../../secret", RELATIVE),
    ("mlflow-artifacts:/0/RUN/artifacts/%2e%2e/secret", RELATIVE),
    ("mlflow-artifacts:/0/RUN/artifacts/%252e%252e/secret", RELATIVE),
    ("mlflow-artifacts:/0/RUN/artifacts/model#/../../secret", RELATIVE),
    ("mlflow-artifacts:/0/RUN/artifacts/model?x=1", RELATIVE),
    ("mlflow-artifacts://evil.example/0/RUN/artifacts/model", RELATIVE),
    ("mlflow-artifacts:/0/RUN/artifacts//model", RELATIVE),
    ("runs:/RUN/../../secret", RELATIVE),
    ("runs:/RUN/model#fragment", RELATIVE),
    ("s3://hanzo-ml/runs/../datasets", RELATIVE),
    ("http://evil.example/model", RELATIVE),
    ("ftp://evil.example/model", "'source' cannot use the 'ftp' scheme"),
    ("mlflow-artifacts://evil.example/model", "'source' cannot use the 'mlflow-artifacts' scheme"),
    ("http:/evil", "Use runs:/"),
    ("https:/evil", "Use runs:/"),
    ("ftp:/evil", "Use runs:/"),
    ("gs:/bucket", "Use runs:/"),
    ("dbfs:/models", "Use runs:/"),
    ("s3://b/x", ABSENT),
    ("s3://hanzo-ml/runs/RUN/artifacts/absent", ABSENT),
    ("s3://hanzo-models/nobody/v1", ABSENT),
    ("runs:/RUN/absent", ABSENT),
    ("runs:/another/model", NOT_CONTAINED),
    ("mlflow-artifacts:/0/RUN/artifacts/absent", ABSENT),
    ("mlflow-artifacts:/1/RUN/artifacts/model", NOT_CONTAINED),
    ("mlflow-artifacts:/0/another/artifacts/model", NOT_CONTAINED),
    ("mlflow-artifacts:/0/RUN", NOT_CONTAINED),
    ("mlflow-artifacts:/models", NOT_CONTAINED),
    ("models:/m-0123456789abcdef", NOT_CONTAINED),
    ("models:/m", NOT_CONTAINED),
    ("dummy-source", LOCAL),
    ("x" * 2001, "'source' exceeds the maximum length"),
    ("", "Missing value for required parameter 'source'"),
]


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_either)


@pytest.fixture
def asked_of_s3(server: ArtifactServer, request: pytest.FixtureRequest) -> list[S3Request]:
    """Record the requests to S3 from now on; there are none for a folder."""
    if server.process.settings.storage.endpoint is None:
        return []
    s3: S3Server = request.getfixturevalue("s3_session")
    return s3.requests


@pytest.mark.requirement("F11")
def test_missing_or_foreign_model_version_source_is_refused(server: ArtifactServer, asked_of_s3: list[S3Request]) -> None:
    run_id = server.new_run()
    name = f"m-{run_id}"
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        http.put(f"{PROXY}/0/{run_id}/artifacts/model/MLmodel", content=b"x").raise_for_status()
        http.post(f"{API}/registered-models/create", json={"name": name}).raise_for_status()
        asked_of_s3.clear()
        for source, message in REFUSED_SOURCES:
            body = {"name": name, "source": source.replace("RUN", run_id), "run_id": run_id}
            answer = http.post(f"{API}/model-versions/create", json=body)
            refusal = answer.json()
            assert (answer.status_code, refusal["error_code"]) == (400, "INVALID_PARAMETER_VALUE"), (source, refusal)
            assert message in refusal["message"], (source, refusal)
            assert str(server.process.home) not in refusal["message"], source
        asked = [request.path for request in asked_of_s3]
        assert http.get(f"{API}/model-versions/search", params={"filter": f"name = '{name}'"}).json() == {}
        body = {"name": name, "source": f"runs:/{run_id}/model", "run_id": run_id}
        assert http.post(f"{API}/model-versions/create", json=body).is_success, "or all would be refused for another reason"
    is_on_s3 = server.process.settings.storage.endpoint is not None
    assert bool(asked) is is_on_s3
    for path in asked:  # S3 got requests only for our own buckets, with paths that do not escape
        assert path.split("/")[1] in BUCKETS.values() and ".." not in path, path


def test_run_artifact_root_is_a_valid_source_before_the_run_has_files(server: ArtifactServer) -> None:
    """MLflow's own REST API tests require it.

    The specification's `/v1` creates versions of files alone.
    """
    run_id = server.new_run()
    name = f"m-{run_id}"
    root = f"mlflow-artifacts:/0/{run_id}/artifacts"
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        http.post(f"{API}/registered-models/create", json={"name": name}).raise_for_status()
        for source, status in ((root, 200), (f"{root}/model", 400)):
            body = {"name": name, "source": source, "run_id": run_id}
            assert http.post(f"{API}/model-versions/create", json=body).status_code == status, source
        for other in ("", server.new_run()):
            body = {"name": name, "source": root, "run_id": other}
            assert http.post(f"{API}/model-versions/create", json=body).status_code == 400, other
        made = http.post("/v1/models/register", json={"name": name, "artifact_uri": root})
        assert made.status_code == 400 and ABSENT in made.json()["message"], made.text
        found = http.get(f"{API}/model-versions/search", params={"filter": f"name = '{name}'"}).json()["model_versions"]
        assert [(version["source"], version["run_id"]) for version in found] == [(root, run_id)]
