"""One tiny model and one dataset for all tests of training."""

import signal
from collections.abc import Iterator

import pytest

from tests.recipes.training.place import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def signals_stay() -> Iterator[None]:
    """Training catches SIGTERM; the process of the tests does not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
