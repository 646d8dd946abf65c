"""Losses of a run that the tracker does not know any more: of a database that was put back to a day before they were logged.

The run's result has them. What else was logged since is in no other place, and is gone.
"""

from collections.abc import Mapping
from itertools import islice

from hanzo_ml_assets.control_plane import ControlPlane
from hanzo_ml_assets.unsent import AT_ONCE, newest_times
from resources.metadata.outbox import now_ms
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking_rules import metric_point

LOSS = "train/loss"


def log_lost(run_id: str, losses: Mapping[int, float | None], control_plane: ControlPlane) -> None:
    """Log the losses of those steps that have none, at the time of now; whatever a step has stays as it is. Of one that was
    no finite number the result does not say which it was: it is not told.
    """
    data, known = RunData(control_plane.database), newest_times(Metrics(control_plane.database), run_id, LOSS)
    now = now_ms()
    lost = ((step, loss) for step, loss in sorted(losses.items()) if loss is not None and step not in known)
    points = (metric_point(LOSS, loss, step, now) for step, loss in lost)
    while batch := list(islice(points, AT_ONCE)):
        data.log_batch(run_id, metrics=batch)
