"""Commands are accepted only from the server's own user.

Other users of the machine can reach the port too.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from api.auth.local_peer import is_own_user
from tests.support.server_process import ServerProcess

COMMAND = b'{"name": "n", "command": ["true"]}'


@pytest.fixture(params=["127.0.0.1", "::1"])
def ends(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[str, int]]]:
    """Open a connection within this process.

    Returns both ends, as a server receives them.
    """
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family)
    except OSError as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        yield {"client": client.getsockname()[:2], "server": listener.getsockname()[:2]}


def test_connection_is_attributed_to_its_user(ends: dict[str, tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own_user(ends)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert not is_own_user(ends)


def test_unknown_connection_is_attributed_to_no_user(ends: dict[str, tuple[str, int]]) -> None:
    host, port = ends["server"]
    assert not is_own_user({**ends, "client": (host, port)})
    assert not is_own_user({**ends, "client": (host, 0)})
    assert not is_own_user({**ends, "client": ("somebody", 0)})
    assert not is_own_user({**ends, "client": None})


def test_command_from_the_servers_own_user_is_accepted_unless_proxied(server: ServerProcess) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/jobs", content=COMMAND, headers=headers)
    assert answer.status_code == 201, answer.text
    cancelled = httpx.post(f"{server.url}/v1/jobs/{answer.json()['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    own = socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port))
    for name in ("somebody", "127.0.0.1", f"127.0.0.1:{own.getsockname()[1]}"):
        forwarded = httpx.post(f"{server.url}/v1/jobs", content=COMMAND, headers={**headers, "X-Forwarded-For": name})
        assert (forwarded.status_code, "not through a proxy" in forwarded.text) == (403, True)
    own.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_command_from_another_local_user_is_refused(server: ServerProcess) -> None:
    bash, port = shutil.which("bash"), httpx.URL(server.url).port
    fields = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(COMMAND)}")
    text = "\\r\\n".join(("POST /v1/jobs HTTP/1.1", *fields, "", COMMAND.decode()))
    script = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{text}' >&3; timeout 20 head -n 1 <&3"
    asked = subprocess.run([str(bash), "-c", script], user="nobody", cwd="/", capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("HTTP/1.1 403")
