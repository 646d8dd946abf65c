"""Network namespaces of the cluster, with a bridge, and of each node attached to it.

Nothing leaves the cluster's namespace, and no port or address of the machine is used: any number of clusters can run in
parallel with the same addresses.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

GATEWAY = "10.89.0.1"
"""The bridge: API server, DNS, S3, PostgreSQL and servers that tests start in the namespace listen here."""
SERVICES = "10.90.0.0/16"
KUBERNETES_SERVICE = "10.90.0.1"
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000


def node_address(number: int) -> str:
    return f"10.89.0.{10 + number}"


def pod_range(number: int) -> str:
    return f"10.91.{number}.0/24"


def create_cluster_network(name: str) -> None:
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "add", "br0", "type", "bridge")
    ip("-n", name, "addr", "add", f"{GATEWAY}/16", "dev", "br0")
    ip("-n", name, "link", "set", "br0", "up")
    forward(name)


def device(number: int) -> str:
    """The end of a node's cable at the bridge."""
    return f"node{number}"


def attach_node(cluster: str, namespace: str, number: int, others: dict[int, str]) -> None:
    """Connect a node to the bridge.

    Each node reaches the pods of the `others`, and the bridge those of all.
    """
    ip("netns", "add", namespace)
    ip("link", "add", device(number), "netns", cluster, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    ip("-n", cluster, "link", "set", device(number), "master", "br0", "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", namespace, "addr", "add", f"{node_address(number)}/16", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")
    ip("-n", namespace, "route", "add", "default", "via", GATEWAY)
    forward(namespace)
    route_pods(cluster, number)
    for other_number, other in others.items():
        route_pods(other, number)
        route_pods(namespace, other_number)


def set_cable(cluster: str, number: int, state: Literal["up", "down"]) -> None:
    ip("-n", cluster, "link", "set", device(number), state)


def detach_node(cluster: str, namespace: str, number: int) -> None:
    """Delete a node's namespace, and its device first.

    The kernel removes a deleted namespace, and the devices in it, at some later time.
    """
    subprocess.run(["ip", "-n", cluster, "link", "delete", device(number)], check=False, capture_output=True)
    delete_network(namespace)


def route_pods(namespace: str, number: int) -> None:
    ip("-n", namespace, "route", "replace", pod_range(number), "via", node_address(number))


def forward(namespace: str) -> None:
    subprocess.run([*inside(namespace), "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)


def inside(namespace: str) -> list[str]:
    """Return the prefix of a command that runs in a network namespace.

    `ip netns exec` would hide the cgroups: it remounts /sys.
    """
    return ["nsenter", f"--net={NAMESPACES / namespace}"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def delete_network(namespace: str) -> None:
    """Delete a namespace; the kernel deletes its devices, addresses and routes."""
    if (NAMESPACES / namespace).exists():
        ip("netns", "delete", namespace)


def processes(namespace: str) -> list[int]:
    if not (NAMESPACES / namespace).exists():
        return []
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Run this thread, and all that it starts, in a network namespace."""
    other = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        with switched(other):
            yield
    finally:
        os.close(other)


@contextmanager
def switched(descriptor: int) -> Iterator[None]:
    """Run this thread in the network namespace of a file descriptor (see `open_current`)."""
    own = open_current()
    try:
        set_namespace(descriptor)
        yield
    finally:
        set_namespace(own)
        os.close(own)


def open_current() -> int:
    """Open a file descriptor of this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def set_namespace(descriptor: int) -> None:
    """Call `setns`, which Python's `os` only has from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
