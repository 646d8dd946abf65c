"""Equal content gets one version by any route: HTTP, command line, or a definition."""

import json
import os
from pathlib import Path

import httpx
import pytest

from tests.support.assets.checked_dataset import Graph, rows, shown
from tests.support.cli.command_line import run
from tests.support.server_process import ServerProcess


@pytest.mark.slow
def test_same_content_is_one_version_by_http_command_line_and_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HANZO_ML_") and not name.endswith("_PORT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HANZO_ML_HOME", str(tmp_path / "home"))
    file = tmp_path / "d.jsonl"
    with ServerProcess(tmp_path / "home") as server:
        graph = Graph(tmp_path)

        def by_request() -> tuple[str, str, bool]:
            fields = {"name": "doors", "format": "jsonl"}
            files = {"files": (file.name, file.read_bytes())}
            made = httpx.post(f"{server.url}/v1/datasets", data=fields, files=files, timeout=60).json()
            return made["id"], made["content_sha256"], made["created"]

        def by_command() -> tuple[str, str, bool]:
            done = run(server.url, "dataset", "create", "--name", "doors", "--path", str(file), "--json")
            made = json.loads(done.stdout)
            return made["id"], made["content_sha256"], made["created"]

        def by_asset(start: int) -> tuple[str, str]:
            found = shown(graph.materialize(rows(60, start)))
            version = graph.version()
            assert (found["version"], found["content_sha256"]) == (version.version, version.content_sha256)
            return version.id, version.content_sha256

        file.write_text("".join(json.dumps(row) + "\n" for row in rows(60)))
        first = by_request()
        assert first[2] and by_command() == (*first[:2], False) and by_asset(0) == first[:2]
        second = by_asset(60)
        assert second != first[:2] and by_command() == (*second, False) and by_request() == (*second, False)
        listed = httpx.get(f"{server.url}/v1/datasets").json()["datasets"]
        assert [each["version"] for each in listed if each["name"] == "doors"] in ([1, 2], [2, 1])
        graph.plane.database.close()
