"""Which logged models a run read, and which it made at which step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, select

from resources.metadata.tables import logged_models, run_models
from resources.metadata.tracking.logged_model_states import no_model
from resources.metadata.tracking.run_revisions import revise
from resources.metadata.tracking_rules import checked_text
from resources.metadata.transactions import insert_into

Direction = Literal["input", "output"]


@dataclass(frozen=True)
class RunModel:
    model_id: str
    direction: Direction
    step: int


def write_run_models(writer: Connection, run_id: str, direction: Direction, steps: Mapping[str, int]) -> None:
    """Connect a run with models, each at a step. Sending one again moves it to the step that was sent last.

    Raises:
        HanzoError: RESOURCE_DOES_NOT_EXIST for a model that nobody created.
    """
    if not steps:
        return
    ids = sorted(checked_text(model_id, "model_id") for model_id in steps)
    known = set(writer.execute(select(logged_models.c.id).where(logged_models.c.id.in_(ids))).scalars())
    for model_id in ids:
        if model_id not in known:
            raise no_model(model_id)
    revise(writer, run_id)
    statement = insert_into(writer, run_models)
    upsert = statement.on_conflict_do_update(
        index_elements=["run_id", "model_id", "direction"], set_={"step": statement.excluded.step}
    )
    rows = [{"run_id": run_id, "model_id": model_id, "direction": direction, "step": steps[model_id]} for model_id in ids]
    writer.execute(upsert, rows)


def load_run_models(reader: Connection, run_ids: Sequence[str]) -> dict[str, list[RunModel]]:
    """The models of each of a few hundred runs."""
    query = select(run_models).where(run_models.c.run_id.in_(run_ids)).order_by(run_models.c.step, run_models.c.model_id)
    loaded: dict[str, list[RunModel]] = {run_id: [] for run_id in run_ids}
    for row in reader.execute(query):
        loaded[row.run_id].append(RunModel(row.model_id, row.direction, row.step))
    return loaded
