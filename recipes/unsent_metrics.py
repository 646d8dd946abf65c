"""Points of a run that its tracking server did not get: they come beside its result, and whoever records that logs them.

A program that waited for the server instead held its GPUs meanwhile, and lost the points after ten minutes all the same.
"""

from collections.abc import Iterable, Iterator

from pydantic import ConfigDict

from recipes.contracts.frozen_model import Frozen
from recipes.storage.artifact_store import Store

NAME = "unsent_metrics.jsonl"


class UnsentPoint(Frozen):
    """One value of a metric; `timestamp` in ms since 1970. JSON has no NaN and no infinity: they are words there.

    `anew` says that the run did this step otherwise than the first time, whose value may be there too: from up to `since`,
    in ms since 1970. Where that was not written down, nobody knows which is whose.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    key: str
    value: float
    step: int
    timestamp: int
    anew: bool = False
    since: int | None = None


def write_unsent(store: Store, folder: str, points: Iterable[UnsentPoint]) -> None:
    """Beside the result in `folder`, in place of what an earlier end of the run has left."""
    store.put_bytes(f"{folder}/{NAME}", "".join(f"{point.model_dump_json()}\n" for point in points).encode())


def read_unsent(store: Store, folder: str) -> Iterator[UnsentPoint]:
    """Raises FileNotFoundError where none were left."""
    return map(UnsentPoint.model_validate_json, store.get_bytes(f"{folder}/{NAME}").splitlines())
