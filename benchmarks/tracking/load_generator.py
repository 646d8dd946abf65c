"""Generate load by client processes with raw-socket HTTP, for minimal client cost."""

import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

API = "/api/2.0/mlflow/"
Call = tuple[str, str, bytes]
"""Method, path and body."""
MakeCalls = Callable[[int, int], Call]
"""Returns the n-th call of a client, from the client's number and n."""
PREPARED = 500
"""Calls prepared before the clock starts: serializing a batch of a thousand metrics takes as long as an answer."""


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._host = f"127.0.0.1:{port}"
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=300)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, call: Call) -> bytes:
        """Return the response body. Raises RuntimeError unless the status is 200."""
        method, path, body = call
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, answer = self._answer()
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {answer[:300]!r}")
        return answer

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.call((method, API + path, b"" if body is None else json.dumps(body).encode())))

    def close(self) -> None:
        self._socket.close()

    def _answer(self) -> tuple[int, bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, rest = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        status = int(head.split(b" ", 2)[1])
        if fields.get(b"transfer-encoding", b"").strip() == b"chunked":
            return status, self._chunks(rest)
        parts = [rest]
        missing = int(fields[b"content-length"]) - len(rest)
        while missing > 0:
            parts.append(self._more())
            missing -= len(parts[-1])
        return status, b"".join(parts)

    def _chunks(self, received: bytes) -> bytes:
        parts: list[bytes] = []
        while True:
            while b"\r\n" not in received:
                received += self._more()
            size, _, received = received.partition(b"\r\n")
            length = int(size, 16)
            pieces, missing = [received], length + 2 - len(received)
            while missing > 0:
                pieces.append(self._more())
                missing -= len(pieces[-1])
            received = b"".join(pieces)
            if length == 0:
                return b"".join(parts)
            parts.append(received[:length])
            received = received[length + 2 :]

    def _more(self) -> bytes:
        part = self._socket.recv(1 << 20)
        if not part:
            raise RuntimeError("the server closed the connection")
        return part


def latencies(port: int, clients: int, seconds: float, calls: MakeCalls) -> list[float]:
    """Return the seconds of every call by concurrent client processes, after a short warm-up."""
    context = multiprocessing.get_context("fork")
    found: multiprocessing.Queue[list[float] | Exception] = context.Queue()
    start = context.Barrier(clients)
    processes = [
        context.Process(target=_measure, args=(port, seconds, calls, number, start, found), daemon=True)
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    every: list[float] = []
    for _ in processes:
        measured = found.get(timeout=seconds + 300)
        if isinstance(measured, Exception):
            raise measured
        every += measured
    for process in processes:
        process.join()
    return every


def _measure(port: int, seconds: float, calls: MakeCalls, number: int, start: Any, found: Any) -> None:
    try:
        found.put(_latencies_of_one(port, seconds, calls, number, start))
    except Exception as error:
        found.put(error)


def _latencies_of_one(port: int, seconds: float, calls: MakeCalls, number: int, start: Any) -> list[float]:
    # Before connecting: a server closes connections that are idle for seconds.
    prepared = [calls(number, n) for n in range(1, PREPARED + 1)]
    start.wait()
    client = Client(port)
    client.call(calls(number, 0))
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        n = len(taken)
        call = prepared[n] if n < PREPARED else calls(number, n + 1)
        began = time.perf_counter()
        client.call(call)
        taken.append(time.perf_counter() - began)
    return taken


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
