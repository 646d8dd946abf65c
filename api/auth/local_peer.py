"""Identify the user at the other end of a local connection, from the kernel's table.

On a shared machine, loopback without sign-in is open to every user. Requests with the rights of this server's own user, such
as running a command, are accepted from that user only.
"""

import ipaddress
import os
import sys
from pathlib import Path

from starlette.types import Scope

CONNECTIONS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}


def is_own_user(scope: Scope) -> bool:
    """Return whether the request comes directly from a process of this server's own user."""
    # Behind a proxy the user is unknown: the server trusts this header, so a sender could name another user's connection.
    if any(name == b"x-forwarded-for" for name, _ in scope.get("headers", ())):
        return False
    try:
        client, server = kernel_address(scope["client"]), kernel_address(scope["server"])
        lines = CONNECTIONS[ipaddress.ip_address(scope["client"][0]).version].read_text(encoding="utf-8").splitlines()
    except (TypeError, ValueError, OSError):  # no IP address: a Unix socket, or a proxy
        return False
    return any(
        user == os.getuid()
        for local, remote, user in map(parse_connection, lines[1:])
        if (local, remote) == (client, server)
    )


def kernel_address(address: tuple[str, int]) -> str:
    """Format `("127.0.0.1", 8057)` as the kernel does: `0100007F:1F79`, words in host byte order."""
    host, port = address
    packed = ipaddress.ip_address(host).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def parse_connection(line: str) -> tuple[str, str, int]:
    """Parse local end, remote end and user from a line of the kernel's table."""
    fields = line.split()
    return fields[1], fields[2], int(fields[7])
