"""Authenticated connections between launchers of a job: JSON lines over TCP with heartbeats.

Both sides prove that they know the gang's secret before any other message. A connection that goes silent, or closes
without a goodbye, means that the other pod is lost: its node, its network or its launcher.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from contextlib import suppress
from typing import Any

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
GOODBYE_SECONDS = 5.0
MAX_MESSAGE_CHARACTERS = 4000
"""Limit for an exit message on the wire: lines are limited to 64 KiB."""

Message = dict[str, Any]


class PeerLost(Exception):
    """The peer is lost; the message says how that was detected."""


class PeerRefused(Exception):
    """The peer did not prove that it belongs to the gang, or refuses this pod."""


class Connection:
    """An open connection. Sends a heartbeat every second until it is closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._line: asyncio.Task[bytes] | None = None
        self._heard_at = asyncio.get_running_loop().time()
        self._beats = asyncio.create_task(self._beat())

    def send(self, kind: str, **fields: Any) -> None:
        """Send without waiting; messages to a lost peer are dropped."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"type": kind, **fields}).encode() + b"\n")

    async def receive(self) -> Message:
        """Return the next message that is no heartbeat.

        Raises:
            PeerLost: neither arrived for `HEARTBEAT_TIMEOUT_SECONDS`, or the connection ended.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._line = self._line or asyncio.create_task(self._reader.readline())
            began = loop.time()
            await asyncio.wait({self._line}, timeout=HEARTBEAT_SECONDS)
            now = loop.time()
            if self._line.done():
                message, self._heard_at = self._parse(self._line), now
                self._line = None
                if message["type"] != "beat":
                    return message
            elif now - began > 2 * HEARTBEAT_SECONDS:
                self._heard_at = now  # this process itself was suspended, so the silence is meaningless
            elif now - self._heard_at > HEARTBEAT_TIMEOUT_SECONDS:
                raise PeerLost(f"sent no heartbeat for {HEARTBEAT_TIMEOUT_SECONDS:g} s")

    async def close(self) -> None:
        """Flush pending messages and close."""
        self._beats.cancel()
        if self._line is not None:
            self._line.cancel()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), GOODBYE_SECONDS)
        self._writer.close()

    def _parse(self, line: "asyncio.Task[bytes]") -> Message:
        try:
            text = line.result()
            if not text.endswith(b"\n"):
                raise PeerLost("closed its connection without a goodbye")
            message = json.loads(text)
            return {"type": str(message["type"]), **message}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PeerLost(f"broke its connection: {type(error).__name__}") from None

    async def _beat(self) -> None:
        while True:
            self.send("beat")
            await asyncio.sleep(HEARTBEAT_SECONDS)


def prove(key: bytes, side: str, *words: object) -> str:
    return hmac.new(key, json.dumps([side, *map(str, words)]).encode(), hashlib.sha256).hexdigest()


def _proof_of_hello(key: bytes, challenge: str, hello: Message) -> str:
    return prove(
        key, "member", challenge, *(hello.get(name) for name in ("rank", "pod", "node", "uid", "generation", "nonce"))
    )


async def accept_member(connection: Connection, key: bytes) -> Message:
    """Authenticate a member on the first node and return its hello.

    The first node proves itself too.

    Raises:
        PeerLost, PeerRefused, TimeoutError: authentication failed.
    """
    challenge = secrets.token_hex(16)
    connection.send("challenge", nonce=challenge)
    hello = await asyncio.wait_for(connection.receive(), HANDSHAKE_SECONDS)
    if not hmac.compare_digest(str(hello.get("proof")), _proof_of_hello(key, challenge, hello)):
        raise PeerRefused("a connection did not prove that it belongs to this job")
    connection.send("challenged", proof=prove(key, "first", hello["nonce"], challenge))
    return hello


async def greet_first(connection: Connection, key: bytes, **place: Any) -> None:
    """Authenticate this pod to the first node, and the first node to this pod.

    Raises:
        PeerLost, PeerRefused, TimeoutError: it is not the first node, or not ready.
    """
    challenge = (await asyncio.wait_for(connection.receive(), HANDSHAKE_SECONDS)).get("nonce")
    hello = {**place, "nonce": secrets.token_hex(16)}
    connection.send("hello", **hello, proof=_proof_of_hello(key, str(challenge), hello))
    answer = await asyncio.wait_for(connection.receive(), HANDSHAKE_SECONDS)
    if not hmac.compare_digest(str(answer.get("proof")), prove(key, "first", hello["nonce"], challenge)):
        raise PeerRefused("what listens at the first node's address did not prove that it belongs to this job")
