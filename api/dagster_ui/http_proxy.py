"""Forward HTTP requests to Dagster's web server, and stream its responses back."""

import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.dagster_ui.policy import JOB_TAGS, DagsterRun
from resources.errors import ErrorCode, HanzoError
from resources.settings.sections import DAGSTER_PREFIX as PREFIX

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
READ_SECONDS = 120.0
MAX_CONNECTIONS = 100
FORWARDED_REQUEST_HEADERS = (
    "accept",
    "accept-encoding",
    "accept-language",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "range",
)
"""The only client headers that Dagster receives: no credentials, nothing that describes the connection."""
OWN_RESPONSE_HEADERS = frozenset(
    {"connection", "date", "keep-alive", "proxy-authenticate", "server", "set-cookie", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "location"}
)
"""Headers of Dagster's responses that concern its own connection, or that this server sets."""
UNAVAILABLE = (
    "Dagster's web server does not answer, and the tracking server works without it: an operator should check the "
    "deployment dagster-webserver and the setting dagster.url"
)
RUNS_QUERY = """
query DescribeRuns($ids: [String], $limit: Int) {
  runsOrError(filter: {runIds: $ids}, limit: $limit) {
    ... on Runs { results { runId tags { key value } assetSelection { path } } }
  }
}
"""
MAX_DESCRIBED_RUNS = 200


class DagsterServer:
    """HTTP client of one Dagster web server. Connects on first use."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: httpx.AsyncClient | None = None

    async def send(
        self,
        method: str,
        path: str,
        headers: Headers,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Any = None,
        plain: bool = False,
    ) -> "httpx.Response":
        """Return Dagster's response once its headers arrive; the caller reads or closes it.

        Args:
            path: below `PREFIX`, decoded.
            body: JSON to send.
            plain: request uncompressed JSON, because the caller reads it.

        Raises:
            HanzoError: 503 if Dagster's web server does not answer.
        """
        import httpx

        sent = [(name, value) for name in FORWARDED_REQUEST_HEADERS if (value := headers.get(name)) is not None]
        if plain:
            sent = [("accept", "application/json"), ("accept-encoding", "identity")]
        http = self._client()
        request = http.build_request(
            method,
            f"{self.url}{PREFIX}/{quote(path, safe='/@:!$&()*+,;=~')}",
            params=list(query) or None,
            content=None if body is None else json.dumps(body),
            headers=[*sent, *([("content-type", "application/json")] if body is not None else [])],
        )
        for name in ("accept", "accept-encoding", "user-agent"):  # httpx adds its own
            if name not in dict(sent) and name in request.headers:
                del request.headers[name]
        try:
            return await http.send(request, stream=True, follow_redirects=False)
        except (httpx.TransportError, AttributeError) as error:  # AttributeError: anyio, if the connection closes at once
            log.warning("Dagster's web server at %s does not answer: %s", self.url, type(error).__name__)
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, UNAVAILABLE) from None

    async def read_json(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON of Dagster's response to a POST.

        Raises:
            HanzoError: 503 if Dagster's web server does not answer.
        """
        import httpx

        response = await self.send("POST", path, Headers(), body=body, plain=True)
        try:
            await response.aread()
            return response.status_code, response.json()
        except (httpx.TransportError, ValueError) as error:
            log.warning("Dagster's web server broke off a response: %s", type(error).__name__)
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, UNAVAILABLE) from None
        finally:
            await response.aclose()

    async def describe_runs(self, run_ids: Sequence[str]) -> Mapping[str, DagsterRun]:
        """Return assets and jobs of Dagster runs; unknown ids are left out.

        Raises:
            HanzoError: 503 if Dagster's web server does not answer, 400 for too many ids.
        """
        if not run_ids:
            return {}
        if len(run_ids) > MAX_DESCRIBED_RUNS:
            message = f"At most {MAX_DESCRIBED_RUNS} runs at a time: ask for fewer"
            raise HanzoError(ErrorCode.INVALID_PARAMETER_VALUE, message)
        variables = {"ids": list(run_ids), "limit": len(run_ids)}
        _, answer = await self.read_json("graphql", {"query": RUNS_QUERY, "variables": variables})
        try:
            return {run["runId"]: dagster_run(run) for run in answer["data"]["runsOrError"]["results"]}
        except (KeyError, TypeError):
            log.warning("Dagster's web server cannot describe runs: %s", str(answer)[:500])
            raise HanzoError(ErrorCode.TEMPORARILY_UNAVAILABLE, UNAVAILABLE) from None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def _client(self) -> "httpx.AsyncClient":
        from http.cookiejar import CookieJar, DefaultCookiePolicy

        import httpx

        if self._http is None:
            # No keep-alive: a request on a connection that Dagster is just closing would fail.
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # else users would share cookies
                trust_env=False,
            )
        return self._http


class ForwardedResponse(StreamingResponse):
    """Streams a response of Dagster.

    Its connection is closed even if the client disconnects.
    """

    def __init__(self, response: "httpx.Response") -> None:
        super().__init__(response_chunks(response), response.status_code, response_headers(response))
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._response.aclose()


async def response_chunks(response: "httpx.Response") -> AsyncIterator[bytes]:
    """Yield the body as Dagster compressed it."""
    async for chunk in response.aiter_raw():
        yield chunk


def response_headers(response: "httpx.Response") -> dict[str, str]:
    """Return Dagster's headers, with a redirect only below its own prefix."""
    kept = {name: value for name, value in response.headers.items() if name not in OWN_RESPONSE_HEADERS}
    path = response.headers.get("location", "").removeprefix(str(response.request.url.copy_with(raw_path=b"/")).rstrip("/"))
    return kept | ({"location": path} if path == PREFIX or path.startswith(f"{PREFIX}/") else {})


def dagster_run(document: Mapping[str, Any]) -> DagsterRun:
    return DagsterRun(
        assets=tuple("/".join(asset["path"]) for asset in document["assetSelection"] or ()),
        job_ids=tuple(tag["value"] for tag in document["tags"] if tag["key"] in JOB_TAGS),
    )
