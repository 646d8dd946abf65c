"""Ports for the servers of tests."""

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Not one of those that the kernel gives to whoever connects: it might, before the server is there."""
    while True:
        port = secrets.choice(range(15_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
