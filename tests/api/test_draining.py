"""A stopping server responds until its clients have moved: a rolling update refuses no request."""

import os
import signal
from pathlib import Path

import httpx

from tests.support.server_process import ServerProcess


def test_draining_server_still_answers_and_asks_clients_to_close_connections(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {"HANZO_ML_SERVER_DRAIN": "2s"}) as server, httpx.Client(base_url=server.url) as kept:
        assert "connection" not in kept.get("/alive").headers
        os.kill(server.process_id, signal.SIGTERM)
        closed = 0
        while server.is_running:
            try:
                answer = kept.get("/api/2.0/mlflow/experiments/get", params={"experiment_id": "0"})
            except httpx.TransportError:  # a new connection, which a Service routes to another pod
                break
            assert answer.status_code == 200
            closed += answer.headers.get("connection") == "close"
        assert closed > 1
        assert server.wait() == 0


def test_second_signal_ends_a_server_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {"HANZO_ML_SERVER_DRAIN": "1h"}) as server:
        os.kill(server.process_id, signal.SIGTERM)
        while httpx.get(f"{server.url}/alive").headers.get("connection") != "close":
            pass
        os.kill(server.process_id, signal.SIGTERM)
        server.wait()
