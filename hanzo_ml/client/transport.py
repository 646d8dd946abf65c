"""Call the tracking server's MLflow API over httpx, with its authorization header."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from hanzo_ml.client.points import Point, parse_newest_steps
from hanzo_ml.client.retry import is_refusal

TOKEN_VARIABLE = "MLFLOW_TRACKING_TOKEN"


class InvalidToken(ValueError):
    """The value of the token variable cannot be a token."""


def authorization_header() -> dict[str, str]:
    """Return the header with the token, or none without a token.

    It is read on each call, because it may be renewed.

    Raises:
        InvalidToken: the value of the variable cannot be a token.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise InvalidToken(
            f"{TOKEN_VARIABLE} contains a character that is not allowed in a token: copy it again, in one line"
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


API_PREFIX = "/api/2.0/mlflow"
PROXY_PREFIX = "/api/2.0/mlflow-artifacts/artifacts"
CHUNK_BYTES = 1 << 20
POINTS_PER_PAGE = 25_000
"""MLflow's limit for the points in one page of a history."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""These hosts are called directly, without the machine's proxy, which would look for the server on its own host."""


class Unavailable(Exception):
    """The server did not answer, or cannot answer now: try again."""


class Refused(Exception):
    """The server permanently refuses a request; the message is the server's."""

    def __init__(self, message: str, concerns_run: bool = False) -> None:
        super().__init__(message)
        self.concerns_run = concerns_run


class Transport:
    """Calls one tracking server. Not thread-safe."""

    def __init__(self, tracking_uri: str) -> None:
        direct = dict.fromkeys(f"all://{host}" for host in LOOPBACK_HOSTS)
        self._http = httpx.Client(base_url=tracking_uri.rstrip("/"), timeout=httpx.Timeout(30.0, connect=5.0), mounts=direct)

    def create_run(self, experiment_id: str, name: str | None, start_time: int, tags: Mapping[str, str], key: str) -> str:
        """Create a run and return its id. Calls with the same `key` create only one."""
        body = {
            "experiment_id": experiment_id,
            "run_name": name or "",
            "user_id": tags.get("mlflow.user", "unknown"),
            "start_time": start_time,
            "tags": [{"key": name, "value": value} for name, value in tags.items()],
        }
        made = self._call("POST", f"{API_PREFIX}/runs/create", json=body, headers={"Idempotency-Key": key})
        return str(made["run"]["info"]["run_id"])

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        body = {"run_id": run_id, "metrics": [point.to_json() for point in points]}
        self._call("POST", f"{API_PREFIX}/runs/log-batch", json=body)

    def newest_steps(self, run_id: str) -> dict[str, int]:
        return parse_newest_steps(self._call("GET", f"{API_PREFIX}/runs/get", params={"run_id": run_id}))

    def history(self, run_id: str, key: str) -> Iterator[tuple[int, int]]:
        """Yield step and time of each value of a key, page by page."""
        query = {"run_id": run_id, "metric_key": key, "max_results": POINTS_PER_PAGE}
        token = ""
        while True:
            page = self._call(
                "GET", f"{API_PREFIX}/metrics/get-history", params=query | ({"page_token": token} if token else {})
            )
            yield from ((int(point.get("step", 0)), int(point["timestamp"])) for point in page.get("metrics", []))
            token = page.get("next_page_token", "")
            if not token:
                return

    def upload(self, folder: str, name: str, path: Path) -> None:
        """Store a file under exactly this name, below a folder of the artifact proxy."""
        where = "/".join(quote(part, safe="") for part in (*folder.split("/"), *name.split("/")))
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(path.stat().st_size)}
        self._call("PUT", f"{PROXY_PREFIX}/{where}", content=iterate_chunks(path), headers=headers)

    def register(self, name: str, run_id: str, artifact: str, tags: Mapping[str, str]) -> Mapping[str, Any]:
        """Register a run's artifact as the next version of a model, and return the version."""
        body = {"run_id": run_id, "artifact": artifact, "tags": dict(tags)}
        return self._call("POST", f"/v1/models/{quote(name, safe='')}/versions", json=body)

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, **request: Any) -> Mapping[str, Any]:
        try:
            headers = authorization_header() | request.pop("headers", {})
            response = self._http.request(method, path, headers=headers, **request)
        except InvalidToken as error:  # it may be renewed, and until then nothing is lost
            raise Unavailable(str(error)) from None
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._http.base_url} does not answer: {error}") from None
        try:
            answer = response.json()
        except ValueError:
            answer = {}
        if response.is_success and isinstance(answer, dict):
            return answer
        code = str(answer.get("error_code", "")) if isinstance(answer, dict) else ""
        message = f"{method} {path}: {response.status_code} {answer.get('message', '') if code else ''}".rstrip()
        if is_refusal(response.status_code, code):
            raise Refused(message, concerns_run=response.status_code == 404)
        raise Unavailable(message)


def iterate_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
