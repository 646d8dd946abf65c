"""How the tests are spread over processes: a file's tests stay together, and so do those that share a running stack. And
the S3 server that tests of several folders use.
"""

from __future__ import annotations

import functools
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.s3_server import S3Server

ROOT = Path(__file__).parent
ONE_STACK = "chain"
"""The folder whose tests share one stack, which costs more to start than most files take."""
OF_A_CLUSTER = {"postgresql", "s3"}
"""Parameters of tests that run on SQLite and in a folder too, as a laptop does: these are slow tests."""


def pytest_configure() -> None:
    """In a shell's background SIGINT is ignored, and Dagster lets a process that imports it ignore SIGTERM then too: so
    would all that the tests start, and wait for to end.

    Each client of httpx reads all root certificates, 25 ms of processor time: tests make thousands, to ask a server whether
    it has started, and no plain address needs any. They are read once a process.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    settings.register_profile("patient", deadline=None)  # an example that took 0.2 s on a busy machine failed its test
    settings.load_profile("patient")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes do not name a test: a zip holds the time at which it was made, and two processes that collected tests in
    different seconds had different ones, so that none was run.
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
    # The longest first, or one process would be left with it when the others are done.
    items.sort(key=lambda item: item.path.relative_to(ROOT).parts[0] != ONE_STACK)


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    from tests.s3_server import s3_server  # takes a second, which only tests of S3 pay

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_session: S3Server) -> S3Server:
    """The S3 server, with empty buckets."""
    s3_session.empty()
    return s3_session
