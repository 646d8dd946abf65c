"""Who is at the other end of a connection within this machine: the user of that process, as the kernel knows it.

Loopback without sign-in is open to every user of a machine that several share. What has the rights of this server's own
user, as a command has, is taken from that user alone.
"""

import ipaddress
import os
import sys
from pathlib import Path

from starlette.types import Scope

CONNECTIONS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}


def is_own_user(scope: Scope) -> bool:
    """Whether the request comes straight from a process of this server's own user: through a proxy nobody can tell."""
    # The server believes the header, which then names any connection that its sender has seen in the kernel's table.
    if any(name == b"x-forwarded-for" for name, _ in scope.get("headers", ())):
        return False
    try:
        client, server = kernel_address(scope["client"]), kernel_address(scope["server"])
        lines = CONNECTIONS[ipaddress.ip_address(scope["client"][0]).version].read_text(encoding="utf-8").splitlines()
    except (TypeError, ValueError, OSError):  # no address: the client came over something else, or through a proxy
        return False
    return any(
        user == os.getuid()
        for local, remote, user in map(parse_connection, lines[1:])
        if (local, remote) == (client, server)
    )


def kernel_address(address: tuple[str, int]) -> str:
    """`("127.0.0.1", 8057)` as the kernel writes it: `0100007F:1F79`, each word of four bytes in the processor's order."""
    host, port = address
    packed = ipaddress.ip_address(host).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def parse_connection(line: str) -> tuple[str, str, int]:
    """Local end, remote end and user of a line of the kernel's table."""
    fields = line.split()
    return fields[1], fields[2], int(fields[7])
