"""Free ports for the servers of tests."""

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free port outside the kernel's ephemeral range.

    Otherwise a client connection could get it before the server binds it.
    """
    while True:
        port = secrets.choice(range(15_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
