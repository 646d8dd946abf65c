"""A server over the S3 server, for stores of programs in pods."""

from collections.abc import Iterator

import pytest

from tests.api.artifact_server import on_s3
from tests.support.s3_server import S3Server
from tests.support.server_process import ServerProcess


@pytest.fixture(scope="session")
def server_of_pods(s3_session: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("pods"), on_s3(s3_session)) as process:
        yield process
