"""The launcher's calls to the API: claim an attempt, register a node, report the exit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay, wait_random_exponential

from recipes.contracts.exit_reason import ExitDocument, ExitReason
from recipes.contracts.job import Job
from recipes.launch.pod import Pod

CLAIM_SECONDS = 3600.0
"""Retry period at the start. Pods that give up earlier would only be restarted and wait again."""
MAX_PAUSE_SECONDS = 10.0
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FINAL_STATUSES = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
"""Responses that a retry would not change. All others may come from a proxy or a restarting server."""


class ApiUnavailable(Exception):
    """The API did not answer, or cannot at the moment."""


class ApiRefused(Exception):
    """The API refuses this pod; the message is the API's own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.reason = ExitReason.CANCELLED if status == HTTPStatus.CONFLICT else ExitReason.SUPERVISOR_FAILED


@dataclass(frozen=True)
class ClaimedAttempt:
    """An attempt of the job.

    `previous_reason` is the exit reason of the attempt before, if any.
    """

    number: int
    previous_reason: str | None = None


class AttemptApi:
    """API calls of one pod; all are idempotent and retried while the API is unavailable."""

    def __init__(self, job: Job, pod: Pod, log: Callable[[str], None]) -> None:
        self._pod, self._log = pod, log
        self._shares_work = pod.shares_work(job)
        base = f"{pod.api}/v1/jobs/{quote(job.id, safe='')}/programs/{job.program}"
        direct = dict.fromkeys(f"all://{host}" for host in LOOPBACK)
        headers = {"Authorization": f"Bearer {pod.token}"} if pod.token else {}
        self._http = httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT, mounts=direct)

    async def claim(self, gpus: list[str]) -> ClaimedAttempt:
        """Claim the next attempt.

        Raises:
            ApiRefused: the pod is obsolete, or its token is not accepted.
            ApiUnavailable: there was no answer for `CLAIM_SECONDS`.
        """
        answer = await self._post(
            "attempts",
            {
                "generation": self._pod.generation,
                "pod_uid": self._pod.uid,
                "num_nodes": self._pod.num_nodes,
                "shared": self._shares_work,
                **self._placement(gpus),
            },
            CLAIM_SECONDS,
        )
        return ClaimedAttempt(answer["attempt"], answer["previous_reason"])

    async def register_node(self, attempt: int, gpus: list[str]) -> None:
        """Report the node and GPUs of this pod. Raises the errors of `claim`."""
        await self._post(f"attempts/{attempt}/nodes", self._placement(gpus), CLAIM_SECONDS)

    async def report_exit(self, attempt: int, document: ExitDocument, seconds: float) -> None:
        """Report how the attempt ended, retrying for `seconds`. Raises the errors of `claim`."""
        body = {
            "node_rank": self._pod.node_rank,
            "code": document.reason.exit_code,
            "reason": document.reason,
            "message": document.message,
        }
        await self._post(f"attempts/{attempt}/exit", body, seconds)

    def _placement(self, gpus: list[str]) -> Mapping[str, Any]:
        return {"node_rank": self._pod.node_rank, "node": self._pod.node, "gpus": gpus}

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ApiUnavailable),
            wait=wait_random_exponential(multiplier=0.2, max=MAX_PAUSE_SECONDS),
            stop=stop_after_delay(seconds),
            before_sleep=self._log_first_failure,
            reraise=True,
        )
        answer: Mapping[str, Any] = await retrying(self._send, path, body)
        return answer

    def _log_first_failure(self, state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            self._log(f"{state.outcome.exception()}: retrying")

    async def _send(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise ApiUnavailable(f"{self._pod.api} does not answer: {type(error).__name__} {error}") from None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        message = answer.get("message", "") if isinstance(answer, dict) else ""
        if response.status_code in FINAL_STATUSES and message:  # an error page of a proxy has no message
            raise ApiRefused(f"the API refuses this pod ({response.status_code}): {message}", response.status_code)
        raise ApiUnavailable(f"{response.request.url}: {response.status_code} {message}".rstrip())
