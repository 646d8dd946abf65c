"""`make pin-images` against a registry that speaks the distribution API over HTTP, with tokens."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "deploy" / "pin_images.py"
PLATFORMS = ("amd64", "arm64")
INDEX = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{"digest": f"sha256:{'0' * 64}", "platform": {"os": "linux", "architecture": a}} for a in PLATFORMS],
    }
).encode()
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """A registry with one image, `hanzoai/ml:latest`, that requires a token."""

    def do_GET(self) -> None:
        host = self.headers["Host"]
        if self.path.startswith("/token"):
            granted = self.path == "/token?service=registry&scope=repository%3Ahanzoai%2Fml%3Apull"
            self.answer(200 if granted else 403, b'{"token": "anonymous"}')
        elif self.headers.get("Authorization") != "Bearer anonymous":
            scope = 'service="registry",scope="repository:hanzoai/ml:pull"'
            self.answer(401, b"{}", **{"WWW-Authenticate": f'Bearer realm="http://{host}/token",{scope}'})
        elif self.path == "/v2/hanzoai/ml/manifests/latest" and "image.index" in self.headers["Accept"]:
            self.answer(200, INDEX, **{"Docker-Content-Digest": DIGEST})
        elif self.path == "/v2/hanzoai/ml/manifests/tampered":
            self.answer(200, INDEX + b" ", **{"Docker-Content-Digest": DIGEST})
        else:
            self.answer(404, b"{}")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def registry() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "deploy" / "images" / "engine").mkdir(parents=True)
    (tmp_path / "deploy" / "kubernetes" / "base").mkdir(parents=True)
    return tmp_path


def pin(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, checkout], capture_output=True, text=True, check=False)


def test_images_get_the_digests_of_their_registry(checkout: Path, registry: str) -> None:
    image = f"{registry}/hanzoai/ml:latest"
    containerfile = checkout / "deploy" / "images" / "engine" / "Containerfile"
    manifest = checkout / "deploy" / "kubernetes" / "base" / "config.yaml"
    containerfile.write_text(f"ARG BASE_IMAGE={image}\nFROM ${{BASE_IMAGE}}\n")
    manifest.write_text(f'run_pods: {{image: {image}}}\ndefault_image: "{image}@sha256:{"a" * 64}"\nimages: none\n')
    done = pin(checkout)
    assert done.returncode == 0, done.stderr
    pinned = f"{image}@{DIGEST}"
    assert containerfile.read_text() == f"ARG BASE_IMAGE={pinned}\nFROM ${{BASE_IMAGE}}\n"
    assert manifest.read_text() == f'run_pods: {{image: {pinned}}}\ndefault_image: "{pinned}"\nimages: none\n'
    assert done.stdout == f"{pinned} (linux/amd64, linux/arm64)\n"
    assert pin(checkout).returncode == 0 and containerfile.read_text().startswith(f"ARG BASE_IMAGE={pinned}\n")


def test_kustomization_entries_get_a_digest_and_keep_their_tag(checkout: Path, registry: str) -> None:
    file = checkout / "deploy" / "kubernetes" / "base" / "kustomization.yaml"
    entry = f"images:\n  - name: {registry}/hanzoai/ml\n    newTag: latest\n"
    file.write_text(f"{entry}replicas:\n  - {{name: hanzo-ml, count: 3}}\n")
    for _ in range(2):
        assert pin(checkout).returncode == 0
        assert file.read_text() == f"{entry}    digest: {DIGEST}\nreplicas:\n  - {{name: hanzo-ml, count: 3}}\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("hanzoai/other:1", "answers 404"), ("hanzoai/ml:0", "answers 404"), ("hanzoai/ml:tampered", "digest differs")],
)
def test_image_without_digest_keeps_its_tag_and_is_reported(checkout: Path, registry: str, name: str, reason: str) -> None:
    manifest = checkout / "deploy" / "kubernetes" / "base" / "api.yaml"
    text = f"image: {registry}/{name}\nimage: {registry}/hanzoai/ml:latest\n"
    manifest.write_text(text)
    done = pin(checkout)
    assert done.returncode == 1
    assert f"{registry}/{name}: not pinned" in done.stderr and reason in done.stderr
    assert manifest.read_text().splitlines() == [
        f"image: {registry}/{name}",
        f"image: {registry}/hanzoai/ml:latest@{DIGEST}",
    ]


def test_unreachable_registry_is_reported_and_nothing_changes(checkout: Path) -> None:
    manifest = checkout / "deploy" / "kubernetes" / "base" / "api.yaml"
    manifest.write_text("image: 127.0.0.1:1/hanzoai/ml:latest\n")
    done = pin(checkout)
    assert done.returncode == 1 and "127.0.0.1:1 cannot be reached" in done.stderr
    assert manifest.read_text() == "image: 127.0.0.1:1/hanzoai/ml:latest\n"
