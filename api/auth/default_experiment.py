"""Give every organization its own default experiment under the id 0.

MLflow's clients log to experiment 0 when they name none. Row 0 belongs to the organization of embedded mode; for others the
id is replaced in the request, so that a script that names no experiment runs unmodified.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool

from resources.metadata.database import Database
from resources.metadata.tracking.experiments import DEFAULT_NAME, Experiments

PARAMETERS = ("experiment_id", "experiment_ids")
CREATE_RUN_PATH = "/mlflow/runs/create"
"""On this route, no experiment at all means 0."""


class DefaultExperiments:
    """Ids of the organizations' default experiments, created on demand."""

    def __init__(self, database: Database) -> None:
        self._experiments = Experiments(database)
        self._numbers: dict[str, int] = {}

    async def number(self, organization: str) -> int:
        if organization not in self._numbers:
            found = await run_in_threadpool(self._experiments.ensure, DEFAULT_NAME, organization)
            self._numbers[organization] = found.id
        return self._numbers[organization]


def is_default(value: Any) -> bool:
    """Return whether a text or number is read as 0."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return False
    try:
        return int(value) == 0
    except ValueError:
        return False


def requests_default(route: str, query: Mapping[str, Sequence[str]], body: Any) -> bool:
    if any(is_default(value) for name in PARAMETERS for value in query.get(name, ())):
        return True
    if not isinstance(body, dict):
        return False
    in_list = body.get("experiment_ids")
    return (
        is_default(body.get("experiment_id"))
        or (isinstance(in_list, list) and any(is_default(value) for value in in_list))
        or (route.endswith(CREATE_RUN_PATH) and not body.get("experiment_id"))
    )


def replace_in_body(route: str, body: Mapping[str, Any], own: int) -> dict[str, Any]:
    """Return the body with the organization's own id for 0."""
    replaced = dict(body)
    if is_default(body.get("experiment_id")) or (route.endswith(CREATE_RUN_PATH) and not body.get("experiment_id")):
        replaced["experiment_id"] = str(own)
    if isinstance(in_list := body.get("experiment_ids"), list):
        replaced["experiment_ids"] = [str(own) if is_default(value) else value for value in in_list]
    return replaced


def replace_in_query(query: Mapping[str, Sequence[str]], own: int) -> str:
    pairs = [
        (name, str(own) if name in PARAMETERS and is_default(value) else value)
        for name, values in query.items()
        for value in values
    ]
    return urlencode(pairs)
