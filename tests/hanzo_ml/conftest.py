"""A real tracking server for each test, because these tests kill it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.server_process import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path) as process:
        yield process
