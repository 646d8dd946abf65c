"""Which logged models a run read, and which it made at which step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, select

from resources.metadata.tables import run_models
from resources.metadata.tracking.run_revisions import next_place, revise
from resources.metadata.tracking_rules import check_length, checked_text
from resources.metadata.transactions import insert_into

Direction = Literal["input", "output"]
MAX_MODEL_ID = 256


@dataclass(frozen=True)
class RunModel:
    model_id: str
    direction: Direction
    step: int


def write_run_models(writer: Connection, run_id: str, direction: Direction, steps: Mapping[str, int]) -> None:
    """Connect a run with models, each at a step. Sending one again moves it to the step that was sent last.

    That there is such a model is not asked, as in MLflow: what a run read may be another tracking server's. Where there are
    organizations, the API asks.
    """
    if not steps:
        return
    for model_id in steps:
        check_length("model_id", checked_text(model_id, "model_id"), MAX_MODEL_ID)
    revise(writer, run_id)
    statement = insert_into(writer, run_models)
    upsert = statement.on_conflict_do_update(
        index_elements=["run_id", "model_id", "direction"], set_={"step": statement.excluded.step}
    )
    first = next_place(writer, run_models, run_id)
    rows = [
        {"run_id": run_id, "model_id": model_id, "direction": direction, "step": step, "place": place}
        for place, (model_id, step) in enumerate(steps.items(), first)
    ]
    writer.execute(upsert, rows)


def load_run_models(reader: Connection, run_ids: Sequence[str]) -> dict[str, list[RunModel]]:
    """The models of each of a few hundred runs, in the order in which each run logged them."""
    query = (
        select(run_models)
        .where(run_models.c.run_id.in_(run_ids))
        .order_by(run_models.c.place, run_models.c.step, run_models.c.model_id)
    )
    loaded: dict[str, list[RunModel]] = {run_id: [] for run_id in run_ids}
    for row in reader.execute(query):
        loaded[row.run_id].append(RunModel(row.model_id, row.direction, row.step))
    return loaded
