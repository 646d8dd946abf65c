"""Distribution of tests over processes, and shared fixtures.

A file's tests stay in one process, and so do those that share a running stack. All tests share ports without a listener,
and an S3 server.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.s3_server import S3Server

ROOT = Path(__file__).parent
ONE_STACK = "end_to_end"
"""The folder whose tests share one stack, which costs more to start than most files take."""
LONGEST_FIRST = (ONE_STACK, "recipes/preparation", "recipes/training")
"""Folders in the order in which they start: a process that began one of them last would work alone at the end."""
SERVICES = ("SERVER", "METRICS", "ENGINE", "DAGSTER", "DAGSTER_CODE_SERVER")
OF_A_CLUSTER = {"postgresql", "s3"}
"""Parameters of tests that also run on SQLite and in a folder, as on a laptop: these are slow tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Restore default signals, and cache root certificates.

    A shell's background processes ignore SIGINT, and Dagster then makes processes that import it ignore SIGTERM too:
    all that the tests start and wait for would inherit that.

    Each client of httpx reads all root certificates, 25 ms of processor time: tests make thousands, to check whether a
    server has started, and no plain address needs any. They are read once per process.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    settings.register_profile("patient", deadline=None)  # an example that took 0.2 s on a busy machine failed its test
    settings.load_profile("patient")
    reserve_ports(config)


def reserve_ports(config: pytest.Config) -> None:
    """Point this process's settings at ports without a listener.

    A stack of `make demo` has the default ones. A socket that is bound and does not listen keeps its port from other
    processes, and refuses connections.
    """
    for service in SERVICES:
        reserved = socket.socket()
        config.add_cleanup(reserved.close)
        reserved.bind(("127.0.0.1", 0))
        os.environ[f"HANZO_ML_{service}_PORT"] = str(reserved.getsockname()[1])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep bytes out of test ids.

    A zip holds its creation time: two processes that collected tests in different seconds had different ids, so that no
    test was run.
    """
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(ROOT)
        group = ONE_STACK if path.parts[0] == ONE_STACK else path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
        called_with = getattr(item, "callspec", None)  # of a test with parameters
        if called_with and OF_A_CLUSTER & {value for value in called_with.params.values() if isinstance(value, str)}:
            item.add_marker(pytest.mark.slow)
    items.sort(key=place_in_order)


def place_in_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT)
    return next((place for place, first in enumerate(LONGEST_FIRST) if folder.is_relative_to(first)), len(LONGEST_FIRST))


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    from tests.support.s3_server import s3_server  # takes a second, which only tests of S3 need to spend

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server) -> S3Server:
    """Return the S3 server, with empty buckets."""
    s3_session.empty()
    return s3_session
