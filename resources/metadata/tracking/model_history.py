"""The tag in which releases of MLflow before 3 keep the models that a run logged: a JSON list that grows."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from resources.errors import invalid
from resources.metadata.database import Database
from resources.metadata.run_tags import LOGGED_MODELS_TAG
from resources.metadata.tables import run_tags
from resources.metadata.tracking.run_data import require_active, write_tags
from resources.metadata.tracking_rules import checked_text


class ModelHistory:
    """Model histories in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, run_id: str, entry: Mapping[str, Any]) -> None:
        """Add a model to a run's history. The tag may become longer than a client's own may be, as in MLflow."""
        stored = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == LOGGED_MODELS_TAG)
        with self._database.write() as writer:
            # Locks the run's row, so that no other writer appends to the same list meanwhile.
            require_active(writer, run_id)
            history = parsed(run_id, writer.execute(stored).scalar())
            text = checked_text(json.dumps([*history, entry]), "model_json")
            write_tags(writer, run_id, {LOGGED_MODELS_TAG: text})


def parsed(run_id: str, value: str | None) -> list[Any]:
    try:
        history = json.loads(value or "[]")
    except (ValueError, RecursionError):
        history = None
    if not isinstance(history, list):
        raise invalid(f"The tag {LOGGED_MODELS_TAG} of run {run_id} is no list of models: delete it and log the model again")
    return history
