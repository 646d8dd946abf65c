"""Uploaded content is served as a download, never executed or deserialized.

CVE-2024-27132 (content that a browser would run), 2024-37052 to 2024-37060 (models that are pickles), 2023-47248 (pickles
in Arrow files).
"""

import json
import os
import pickle
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import httpx
import pyarrow
import pytest
import yaml
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from api.app import MLFLOW_PREFIXES, create_app
from api.auth.route_matching import Routes
from api.routing import list_query_parameters
from resources.settings.settings import Settings
from tests.api.artifact_server import PROXY, Answer, ArtifactServer
from tests.support.server_process import ServerProcess

API = "/api/2.0/mlflow"
PAGE = "<script>alert(1)</script>"
NAME = "page.html"


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    return ArtifactServer(server_on_either)


@pytest.fixture(scope="module")
def http(server: ArtifactServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """Return the application, for its routes."""
    return create_app(Settings.load({"HANZO_ML_HOME": str(tmp_path_factory.mktemp("routes"))}))


def made(answer: httpx.Response) -> Any:
    assert answer.is_success, (str(answer.request.url), answer.text)
    return answer.json()


def new_logged_model(http: httpx.Client, run_id: str) -> str:
    body = {"experiment_id": "0", "name": "net", "source_run_id": run_id}
    return str(made(http.post(f"{API}/logged-models", json=body))["model"]["info"]["model_id"])


BELOW_THE_PREFIXES = {
    "/mlflow/artifacts/get",
    "/mlflow/logged-models/{model_id}/artifacts/files",
    "/mlflow-artifacts/artifacts/{artifact_path:path}",
    "/mlflow-artifacts/artifacts/models/{name}/{number:version}/{path:path}",
}
DOWNLOADS = {prefix + path for prefix in MLFLOW_PREFIXES for path in BELOW_THE_PREFIXES} | {
    "/get-artifact",
    "/model-versions/get-artifact",
    "/v1/datasets/{dataset_id}/preview",
}
LINK = "/v1/dataset-files"
"""S3 itself serves the links that point to it."""


def uploads(server: ArtifactServer, http: httpx.Client) -> list[dict[str, str]]:
    """Upload the page in every way.

    Returns its locations by parameter name: a different one each time where an upload has several.
    """
    run_id = server.new_run()
    model_id = new_logged_model(http, run_id)
    places = [f"0/{run_id}/artifacts/{NAME}", f"0/models/{model_id}/artifacts/{NAME}", f"of-nobody/{run_id}/{NAME}"]
    for place in places:
        made(http.put(f"{PROXY}/{place}", content=PAGE.encode()))
    model = f"pages-{run_id}"
    made(http.post(f"{API}/registered-models/create", json={"name": model}))
    of_run, of_model = {"run_id": run_id}, {"model_id": model_id}
    stored = f"s3://hanzo-ml/runs/{run_id}/artifacts"
    for source, owner in ((stored, of_run), (f"runs:/{run_id}", of_run), (f"models:/{model_id}", of_model)):
        made(http.post(f"{API}/model-versions/create", json={"name": model, "source": source, **owner}))
    record = json.dumps({"text": PAGE}).encode() + b"\n"
    files = {"files": ("a.jsonl", record * 4, "application/jsonl")}
    dataset_id = made(http.post("/v1/datasets", data={"name": f"d-{run_id}"}, files=files))["id"]
    url = made(http.get(f"/v1/datasets/{dataset_id}/download", params={"content": "source"}))["url"]
    everywhere = {
        **(dict(parse_qsl(urlsplit(url).query)) if url.startswith(server.url) else {}),
        "run_id": run_id,
        "run_uuid": run_id,
        "experiment_id": "0",
        "model_id": model_id,
        "dataset_id": dataset_id,
        "name": model,
        "number": "1",
        "path": NAME,
        "artifact_file_path": NAME,
        "key": NAME,
    }
    numbers = ("1", "2", "3")
    return [{**everywhere, "version": n, "artifact_path": place} for n, place in zip(numbers, places, strict=True)]


def asked(template: str, values: dict[str, str], known: Collection[str] | None) -> str:
    """Return the address of a route with its query parameters.

    All of them where `known` is None, as MLflow ignores others.
    """
    path = re.sub(r"\{(\w+)[^}]*\}", lambda found: values.get(found[1], "x"), template)
    given = {name: value for name, value in values.items() if known is None or name in known}
    return f"{quote(path)}?{urlencode(given)}"


def check_harmless(answer: Answer, what: str) -> None:
    assert "sandbox" in answer.headers["Content-Security-Policy"], what
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"], what
    assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"], what
    assert "Access-Control-Allow-Origin" not in answer.headers, what


def test_every_route_serving_an_upload_prevents_browser_execution(
    server: ArtifactServer, http: httpx.Client, app: FastAPI
) -> None:
    """Calls every route that reads, and determines here which of them return the page."""
    found: dict[str, set[str]] = {}
    query_parameters = {
        context.path: set(list_query_parameters(route.dependant))
        for context in iter_route_contexts(app.routes)
        if isinstance(route := context.original_route, APIRoute) and str(context.path).startswith("/v1")
    }
    for values in uploads(server, http):
        for route in Routes(app).all:
            if route.method != "GET":
                continue
            address = asked(route.template, values, query_parameters.get(route.template))
            answer = server.raw("GET", address)
            if PAGE.encode() not in answer.body:
                continue
            if answer.headers["Content-Type"] == "application/json":
                assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"], address
                continue
            found.setdefault(route.template, set()).add(address)
            for method, range_ in (("GET", ""), ("HEAD", ""), ("GET", "bytes=0-9"), ("GET", "bytes=9999-")):
                headers = {"Range": range_} if range_ else {}
                again = server.raw(method, address, headers=headers)
                assert again.status in (200, 206, 416), (method, address, again)
                check_harmless(again, f"{method} {address} {range_}")
                is_shown = again.headers.get_content_type() == "application/jsonl"
                assert is_shown or again.headers["Content-Disposition"].startswith("attachment"), address
    assert found.keys() == DOWNLOADS | ({LINK} if server.process.settings.storage.endpoint is None else set())
    for several in ("/model-versions/get-artifact", f"{PROXY}/{{artifact_path:path}}"):
        assert len(found[several]) == 3, "from each of its places"


class Payload:
    """Creates a folder when it is deserialized."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._mark,)


def arrow_file(pickled: bytes) -> bytes:
    """Return an Arrow file whose column has a type that older pyarrow unpickled."""
    kind = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    schema = pyarrow.schema([pyarrow.field("text", pyarrow.string(), metadata=kind)])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, schema) as writer:
        writer.write_table(pyarrow.table([["a"]], schema=schema))
    return bytes(sink.getvalue())


@pytest.mark.requirement("X8")
def test_uploaded_pickles_and_yaml_are_never_loaded(server: ArtifactServer, http: httpx.Client, tmp_path: Path) -> None:
    mark = tmp_path / "loaded"
    pickled = pickle.dumps(Payload(mark))
    tagged = f"flavors: !!python/object/apply:os.mkdir [{mark}]\n"
    files = {"python_model.pkl": pickled, "model.pt": pickled, "model.safetensors": pickled, "config.json": pickled}
    files["MLmodel"] = tagged.encode()
    run_id = server.new_run()
    model_id = new_logged_model(http, run_id)
    roots = f"0/{run_id}/artifacts/model", f"0/models/{model_id}/artifacts"
    for root in roots:
        for name, content in files.items():
            made(http.put(f"{PROXY}/{root}/{name}", content=content))
    model = f"pickled-{run_id}"
    made(http.post(f"{API}/registered-models/create", json={"name": model}))
    of_run, of_model = {"run_id": run_id}, {"model_id": model_id}
    for source, owner in ((f"runs:/{run_id}/model", of_run), (f"models:/{model_id}", of_model)):
        made(http.post(f"{API}/model-versions/create", json={"name": model, "source": source, **owner}))
    for root in roots:
        for place in ("", "/python_model.pkl", "/MLmodel"):
            body = {"name": model, "artifact_uri": f"mlflow-artifacts:/{root}{place}", "stage": "staging"}
            made(http.post("/v1/models/register", json=body))
    for number in range(1, 9):
        for read in ("", "/proof", "/data"):
            assert http.get(f"/v1/models/{model}/versions/{number}{read}").status_code in (200, 404, 409)
        for name, content in files.items() if number < 3 else ():
            version = {"name": model, "version": str(number), "path": name}
            got = http.get("/model-versions/get-artifact", params=version)
            assert got.content == content and "sandbox" in got.headers["Content-Security-Policy"]
    made(http.get(f"/v1/runs/{run_id}"))
    for kind in ("jsonl", "csv", "txt", "parquet", "arrow"):
        for content in (pickled, arrow_file(pickled)):
            sent = {"files": (f"a.{kind}", content, "application/octet-stream")}
            answer = http.post("/v1/datasets", data={"name": f"p-{run_id}-{kind}", "format": kind}, files=sent)
            assert answer.status_code in (201, 400), answer.text
    assert not mark.exists()
    pickle.loads(pickled)  # or the test would prove nothing
    mark.rmdir()
    yaml.unsafe_load(tagged)
    mark.rmdir()
