"""Run revisions: every logged value changes the revision, and cached renderings belong to one revision."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from resources.metadata.database import Database
from resources.metadata.field_rules import metric_point
from resources.metadata.tracking.run_inputs import Dataset, DatasetInput
from resources.metadata.tracking.run_revisions import RenderingCache
from resources.metadata.tracking.run_states import Run
from resources.metadata.tracking.tracking import Tracking
from resources.monitoring.run_health import record_once


def record_alert(tracking: Tracking) -> None:
    with tracking.write() as connection:
        assert record_once(connection, "r", "hanzo_ml.alert", "text", "run.stalled", {})


def with_model(tracking: Tracking) -> str:
    return tracking.logged_models.create(0, name="m").model.id


WRITES: dict[str, Callable[[Tracking], object]] = {
    "a metric": lambda t: t.run_data.log_metric("r", metric_point("new", 1.0, 0, 0)),
    "a metric's next value": lambda t: t.run_data.log_metric("r", metric_point("old", 2.0, 1, 1)),
    "a param": lambda t: t.run_data.log_param("r", "new", "1"),
    "a tag": lambda t: t.run_data.set_tag("r", "new", "1"),
    "a tag's next value": lambda t: t.run_data.set_tag("r", "old", "2"),
    "a batch": lambda t: t.run_data.log_batch("r", params=[("new", "1")]),
    "a tag less": lambda t: t.run_data.delete_tag("r", "old"),
    "a dataset": lambda t: t.inputs.log("r", [DatasetInput(Dataset("d", "1", "local", "{}"), {})]),
    "a model that it read": lambda t: t.inputs.log("r", model_ids=[with_model(t)]),
    "a model that it made": lambda t: t.logged_models.log_outputs("r", {with_model(t): 3}),
    "a model of old clients": lambda t: t.model_history.append("r", {"artifact_path": "m"}),
    "another name": lambda t: t.runs.update("r", name="another"),
    "an alert": record_alert,
}


@pytest.fixture
def tracking(database: Database) -> Tracking:
    tracking = Tracking(database)
    tracking.experiments.ensure_default()
    for run_id in ("r", "other"):
        tracking.runs.create(0, run_id=run_id)
        tracking.run_data.log_batch(run_id, [metric_point("old", 1.0, 0, 0)], [("old", "1")], [("old", "1")])
    return tracking


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_write_increases_only_the_revision_of_its_run(tracking: Tracking, write: Callable[[Tracking], object]) -> None:
    before, other = tracking.runs.get("r"), tracking.runs.get("other")
    logged = tracking.run_search.get(before)
    write(tracking)
    after = tracking.runs.get("r")
    assert after.revision > before.revision
    assert tracking.run_search.get(after) != logged
    assert tracking.runs.get("other") == other


def test_refused_write_does_not_change_the_revision(tracking: Tracking) -> None:
    before = tracking.runs.get("r")
    with pytest.raises(Exception, match="Changing param values is not allowed"):
        tracking.run_data.log_batch("r", [metric_point("new", 1.0, 0, 0)], [("old", "2")])
    with pytest.raises(Exception, match="No tag with name"):
        tracking.run_data.delete_tag("r", "none")
    assert tracking.runs.get("r") == before


def test_every_new_run_has_a_distinct_revision(tracking: Tracking) -> None:
    """Clients may choose run ids, and a store may be emptied under a running server."""
    revisions = {tracking.runs.create(0, run_id=f"r{number}").revision for number in range(20)}
    assert len(revisions) == 20


def run_of(tracking: Tracking, run_id: str, revision: int) -> Run:
    return replace(tracking.runs.get("r"), id=run_id, revision=revision)


def test_rendering_cache_renders_a_revision_once_and_evicts_older_entries(tracking: Tracking) -> None:
    made: list[tuple[str, int]] = []

    def make(missing: Sequence[Run]) -> list[bytes]:
        made.extend((run.id, run.revision) for run in missing)
        return [f"{run.id}{run.revision}".encode().ljust(10) for run in missing]

    kept = RenderingCache(max_bytes=35)
    a1, b1, c1, d1 = (run_of(tracking, name, 1) for name in "abcd")
    a2 = run_of(tracking, "a", 2)
    assert [text.strip() for text in kept.get_or_render([a1, b1], make)] == [b"a1", b"b1"]
    assert [text.strip() for text in kept.get_or_render([b1, a2, a2], make)] == [b"b1", b"a2", b"a2"]
    assert [text.strip() for text in kept.get_or_render([a1, a2], make)] == [b"a1", b"a2"], (
        "an older revision is not the newer's"
    )
    assert made == [("a", 1), ("b", 1), ("a", 2), ("a", 2), ("a", 1)]
    made.clear()
    for run in (a1, b1, c1, d1):
        kept.get_or_render([run], make)
    assert made == [("c", 1), ("d", 1)], "three have room"
    made.clear()
    kept.get_or_render([b1], make)
    assert made == [("b", 1)], "the oldest had to go"
