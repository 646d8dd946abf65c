"""Known attacks on artifact stores, on every route that takes a path.

They run on a folder and on S3, with their original payloads. CVE-2023-1177, 2023-2356, 2023-2780, 2023-6018, 2023-6831,
2023-6909, 2023-6977, 2024-1483, 2024-1558, 2024-1560, 2024-3573, 2024-3848, 2025-11201, 2026-2614 (paths), 2024-27132
(content that a browser would run).
"""

import json
import re
from pathlib import Path
from urllib.parse import quote

import mlflow
import pytest
from mlflow import MlflowClient

from api.app import MLFLOW_ROUTERS, ROUTERS
from tests.api.artifact_server import ArtifactServer
from tests.support.server_process import ServerProcess

SECRET = b"the secret outside"

PATHS = {
    "up": "../../../secret.txt",
    "up in the middle": "a/../../../secret.txt",
    "up to where it began": "a/../b",
    "up at the end": "a/..",
    "here": "./a",
    "here in the middle": "a/./b",
    "absolute": "/etc/passwd",
    "two slashes": "//proc/self/root/etc/passwd",
    "three slashes": "///etc/passwd",
    "empty part": "a//b",
    "slash at the end": "a/",
    "backslash up": "..\\..\\secret.txt",
    "backslash": "a\\b",
    "drive": "C:\\Windows\\win.ini",
    "share": "\\\\host\\share",
    "NUL": "a\x00.txt",
    "new line": "a\nb",
    "delete": "a\x7f",
    "fragment": "a#/../../secret.txt",
    "fragment alone": "#",
    "query": "a?b",
    "encoded up": "%2e%2e/%2e%2e/secret.txt",
    "encoded slash": "..%2f..%2fsecret.txt",
    "encoded twice": "%252e%252e%252fsecret.txt",
    "encoded backslash": "..%5csecret.txt",
    "encoded NUL": "a%00",
    "overlong slash": "..%c0%afsecret.txt",
    "overlong dot": "%c0%ae%c0%ae/secret.txt",
    "not UTF-8": "%ff",
    "replacement": "a\ufffd",
    "file URL": "file:///etc/passwd",
    "S3 URL": "s3://hanzo-models/../x",
    "long name": "n" * 256,
    "long name of wide characters": "ä" * 128,
    "long path": "/".join(["d" * 100] * 11),
}
NAMES = {
    "three dots": "...",
    "dots of another width": "\uff0e\uff0e/\uff0e\uff0e/secret.txt",
    "slash of another width": "..\uff0f..\uff0fsecret.txt",
    "slash of fractions": "..\u2044secret.txt",
    "right to left": "gpj.\u202eexe",
    "tilde": "~/secret.txt",
    "variable": "$HOME/${HOME}",
    "command": "`id`;$(id)|id",
    "quotes": "a'b\"c",
    "percent": "100 %",
    "image of a step": "images/dog%step%100%timestamp%1795420896720%4f3c-2f.png",
    "small image of a step": "images/dog%step%20%timestamp%20%4f3c-2f%compressed.webp",
    "spaces": " a  b ",
    "composed and not": "\u00e4/a\u0308",
    "emoji": "\U0001f600/\U0001f468\u200d\U0001f469.txt",
    "stars": "*",
    "device": "con/nul/aux",
    "dash": "-rf",
    "hidden": ".ssh/authorized_keys",
    "manifest": "x/manifest.json",
}
"""Unusual but valid names: they are stored unchanged inside the run's folder."""


@pytest.fixture(scope="module")
def server(server_on_either: ServerProcess) -> ArtifactServer:
    home = server_on_either.home
    for folder in (home, home / "objects", home / "objects" / "hanzo-ml-checkpoints"):
        folder.mkdir(exist_ok=True)
        (folder / "secret.txt").write_bytes(SECRET)
    return ArtifactServer(server_on_either)


@pytest.fixture(scope="module")
def run_id(server: ArtifactServer) -> str:
    found = server.new_run()
    server.raw("PUT", server.place(found, "page.html"), b"<script>alert(1)</script>")
    return found


@pytest.fixture(scope="module")
def model_id(server: ArtifactServer) -> str:
    body = json.dumps({"experiment_id": "0", "name": "m"})
    answer = server.raw("POST", "/api/2.0/mlflow/logged-models", body, {"Content-Type": "application/json"})
    return str(json.loads(answer.body)["model"]["info"]["model_id"])


def routes(run_id: str, model_id: str) -> dict[str, tuple[str, str]]:
    """List routes that take an artifact path.

    Returns method and address, with PATH in its place.
    """
    api, ajax, proxy = "/api/2.0/mlflow", "/ajax-api/2.0/mlflow", "/api/2.0/mlflow-artifacts"
    return {
        "download": ("GET", f"{proxy}/artifacts/0/{run_id}/artifacts/PATH"),
        "head": ("HEAD", f"{proxy}/artifacts/0/{run_id}/artifacts/PATH"),
        "upload": ("PUT", f"{proxy}/artifacts/0/{run_id}/artifacts/PATH"),
        "delete": ("DELETE", f"{proxy}/artifacts/0/{run_id}/artifacts/PATH"),
        "download of a model": ("GET", f"{proxy}/artifacts/0/models/{model_id}/artifacts/PATH"),
        "upload of a model": ("PUT", f"{proxy}/artifacts/0/models/{model_id}/artifacts/PATH"),
        "delete of a model": ("DELETE", f"{proxy}/artifacts/0/models/{model_id}/artifacts/PATH"),
        "download of a version": ("GET", f"{proxy}/artifacts/models/m/1/PATH"),
        "proxy itself": ("GET", f"{proxy}/artifacts/PATH"),
        "proxy itself, upload": ("PUT", f"{proxy}/artifacts/PATH"),
        "list": ("GET", f"{api}/artifacts/list?run_id={run_id}&path=PATH"),
        "list of the proxy": ("GET", f"{proxy}/artifacts?path=0/{run_id}/artifacts/PATH"),
        "list of the proxy itself": ("GET", f"{proxy}/artifacts?path=PATH"),
        "list of a model": ("GET", f"{api}/logged-models/{model_id}/artifacts/directories?artifact_directory_path=PATH"),
        "file of a model": ("GET", f"{ajax}/logged-models/{model_id}/artifacts/files?artifact_file_path=PATH"),
        "file of the UI": ("GET", f"/get-artifact?run_id={run_id}&path=PATH"),
        "file of a run as FastTrackML has it": ("GET", f"{api}/artifacts/get?run_id={run_id}&path=PATH"),
        "file of a version": ("GET", "/model-versions/get-artifact?name=m&version=1&path=PATH"),
        "upload of the UI": ("POST", f"{ajax}/upload-artifact?run_uuid={run_id}&path=PATH"),
        "upload of v1": ("POST", f"/v1/runs/{run_id}/artifacts?key=PATH"),
        "multipart, first": ("POST", f"{proxy}/mpu/create/PATH"),
        "multipart, last": ("POST", f"{proxy}/mpu/complete/PATH"),
        "multipart, never mind": ("POST", f"{proxy}/mpu/abort/PATH"),
        "static file of the UI": ("GET", "/static-files/PATH"),
        "presigned": ("GET", f"{proxy}/presigned/PATH"),
    }


TIDIED = {"list", "list of the proxy", "list of the proxy itself", "list of a model"}
"""Listings accept `./a/` for `a`, as clients write it."""


NAMES_NO_FILE = {"/v1/datasets/{dataset_id}/diff", "/v1/features/{name}/{key:path}", "/dagster/{path:path}"}
"""The first two take a column of the records or a value of one, which is found by its hash. The last one is proxied to
Dagster's web server; tests/api/dagster_ui attacks its paths."""


def test_every_route_taking_a_path_is_covered() -> None:
    addresses = [address for _, address in routes("RUN", "MODEL").values()]
    known = [address.partition("?")[0].replace("/ajax-api/", "/api/") for address in addresses]
    path_fields = {"path", "artifact_path", "artifact_file_path", "artifact_directory_path", "key"}
    for router in (*MLFLOW_ROUTERS, *ROUTERS):
        for route in router.routes:
            dependant = getattr(route, "dependant", None)
            if route.path in NAMES_NO_FILE:
                continue
            if dependant is None or not path_fields & {
                field.name for field in (*dependant.path_params, *dependant.query_params)
            }:
                continue
            fixed = [part for part in route.path.split("/") if part and not part.startswith("{")]
            assert any(all(part in address.split("/") for part in fixed) for address in known), route.path


@pytest.mark.requirement("X9")
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_path_traversal_never_leaves_the_store(server: ArtifactServer, run_id: str, model_id: str, path: str) -> None:
    home = server.process.home
    before = {found: found.stat().st_mtime_ns for found in home.rglob("*") if found.is_file() and "objects" in found.parts}
    objects = server.store.list("s3://hanzo-ml/runs")
    for name, (method, address) in routes(run_id, model_id).items():
        # Unencoded where a client may send that, encoded once and encoded twice.
        written = [quote(path, safe=""), quote(quote(path, safe=""), safe="")]
        if path.isascii() and path.isprintable() and not set(path) & set(" ?#\\"):
            written.append(path)
        for form in written:
            answer = server.raw(method, address.replace("PATH", form), b"attack" if method in ("PUT", "POST") else b"")
            assert answer.status in (400, 404, 405) or (name in TIDIED and answer.status == 200), (name, form, answer)
            assert SECRET not in answer.body and b"root:" not in answer.body, (name, form)
            if answer.status == 200:
                assert not json.loads(answer.body).get("files"), (name, form)
            assert str(home).encode() not in answer.body, (name, form)
    after = {found: found.stat().st_mtime_ns for found in home.rglob("*") if found.is_file() and "objects" in found.parts}
    assert after == before
    assert server.store.list("s3://hanzo-ml/runs") == objects


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_unusual_file_name_round_trips_literally(server: ArtifactServer, model_id: str, name: str) -> None:
    run_id = server.new_run()
    where = server.place(run_id, quote(name))
    assert server.raw("PUT", where, b"data").status == 200
    answer = server.raw("GET", where)
    assert (answer.status, answer.body) == (200, b"data")
    assert server.store.list(f"s3://hanzo-ml/runs/{run_id}") == [f"s3://hanzo-ml/runs/{run_id}/artifacts/{name}"]
    folder, _, last = name.rpartition("/")
    assert [found["path"] for found in server.files(run_id, folder)] == [name]
    assert "\n" not in answer.headers["Content-Disposition"]
    named = f"filename*=UTF-8''{quote(last, safe='')}"
    if re.fullmatch(r"[\w%+.~-]+", last, re.ASCII):
        named = f"filename={last}"
    elif last.isascii() and not set(last) & set('"%'):
        named = f'filename="{last}"'
    assert answer.headers["Content-Disposition"] == f"attachment; {named}"
    assert server.raw("DELETE", where).status == 200
    assert server.files(run_id) == []


@pytest.mark.parametrize("name", ["page.html", "picture.svg", "data.xml", "script.js", "page.xhtml", "page", "page.HTM"])
def test_uploaded_script_is_never_served_executable_in_our_origin(
    server: ArtifactServer, run_id: str, model_id: str, name: str
) -> None:
    body = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'
    server.raw("PUT", server.place(run_id, name), body)
    server.raw("PUT", f"/api/2.0/mlflow-artifacts/artifacts/0/models/{model_id}/artifacts/{name}", body)
    routes_of = routes(run_id, model_id)
    for route in ("download", "head", "download of a model", "file of a model", "file of the UI"):
        method, address = routes_of[route]
        for headers in ({}, {"Range": "bytes=0-9"}, {"Range": "bytes=9999-"}):
            answer = server.raw(method, address.replace("PATH", name), headers=headers)
            assert answer.status in (200, 206, 416)
            assert answer.headers["Content-Disposition"].startswith("attachment"), route
            assert answer.headers["X-Content-Type-Options"] == "nosniff", route
            assert "sandbox" in answer.headers["Content-Security-Policy"], route
            assert "Access-Control-Allow-Origin" not in answer.headers


def test_symlink_in_the_store_folder_is_not_followed(server: ArtifactServer, tmp_path: Path) -> None:
    if server.process.settings.storage.endpoint is not None:
        return  # S3 has no links
    run_id = server.new_run()
    (tmp_path / "secret").write_bytes(SECRET)
    server.raw("PUT", server.place(run_id, "whole"), b"whole")
    folder = server.store.local_path(f"s3://hanzo-ml/runs/{run_id}/artifacts")
    assert folder is not None
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    assert [found["path"] for found in server.files(run_id)] == ["whole"]
    for name in ("file", "up/secret", "up", "up/new"):
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            answer = server.raw(method, server.place(run_id, name), b"attack" if method == "PUT" else b"")
            assert answer.status == 400, (method, name)
            assert SECRET not in answer.body
    assert (tmp_path / "secret").read_bytes() == SECRET
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_path_with_a_manipulated_id_is_refused(server: ArtifactServer, run_id: str) -> None:
    for place in (
        "0/../artifacts/x",
        "0/%2e%2e/artifacts/secret.txt",
        f"../0/{run_id}/artifacts/page.html",
        f"0/models/{run_id}/artifacts/page.html",
        f"1/{run_id}/artifacts/page.html",
        "models/../1/secret.txt",
        "models/%2e%2e/1/secret.txt",
        f"0/{run_id}/checkpoints/x",
        f"0/{run_id}",
    ):
        for method in ("GET", "PUT", "DELETE"):
            answer = server.raw(method, f"/api/2.0/mlflow-artifacts/artifacts/{place}", b"x" if method == "PUT" else b"")
            assert answer.status in (400, 404, 405), (method, place, answer)


CLIENT_NAMES = ["plain.txt", "with space.txt", "ünïcödé 中文.txt", "50% done.txt", "a+b&c=d;e.txt", "q'uote.txt", "[1].txt"]


def test_unusual_names_round_trip_through_the_mlflow_client(
    server: ArtifactServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    mlflow.set_tracking_uri(server.url)
    client = MlflowClient(server.url)
    run_id = server.new_run()
    source = tmp_path / "source"
    source.mkdir()
    for name in CLIENT_NAMES:
        (source / name).write_text(name)
    client.log_artifacts(run_id, str(source), "a folder")
    listed = client.list_artifacts(run_id, "a folder")
    assert {entry.path: entry.file_size for entry in listed} == {
        f"a folder/{name}": len(name.encode()) for name in CLIENT_NAMES
    }
    target = tmp_path / "target"
    target.mkdir()
    found = Path(client.download_artifacts(run_id, "a folder", str(target)))
    assert {path.name: path.read_text() for path in found.iterdir()} == {name: name for name in CLIENT_NAMES}
