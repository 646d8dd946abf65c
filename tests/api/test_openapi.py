"""The server against its own description: whatever a client makes of it, by its word
or against it, is answered as the description says, or refused."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.api.server_process import ServerProcess

LEAKS = ("Traceback", "sqlalchemy", "sqlite", "psycopg", "SELECT ", "INSERT ", "/site-packages/")
NOT_OFFERED = 501
"""What the reference has only on some stores (multipart, presigned URLs) is declared, and answered with this."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("openapi")) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
def test_every_answer_is_declared_and_none_is_a_fault_of_the_server(server: ServerProcess, mode: GenerationMode) -> None:
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # The mirror for pages is the same routes once more; a log that is followed does not end.
    operations = [found.ok() for found in described.exclude(path_regex=r"^/ajax-api|/logs$").get_all_operations()]
    assert len(operations) > 100
    if mode.is_negative:  # any text fits into a path: what has no other parameter cannot be asked wrongly
        operations = [found for found in operations if list(found.query) or list(found.body)]
        assert len(operations) > 80
    for operation in operations:
        try_out(operation, mode)


def try_out(operation: schemathesis.APIOperation, mode: GenerationMode) -> None:
    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode))
    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=30)
        sent = case.as_curl_command()
        assert answer.status_code < 500 or answer.status_code == NOT_OFFERED, (sent, answer.text)
        declared = operation.definition.raw["responses"]
        status = str(answer.status_code)
        assert status in declared or f"{status[0]}XX" in declared, (sent, answer.text)
        if answer.status_code >= 400:
            error = answer.json()
            assert set(error) == {"error_code", "message"}, sent
            assert "\n" not in error["message"], sent
            assert not [leak for leak in LEAKS if leak in error["message"] and leak not in sent], (sent, error)

    check()
