"""What a training program measured while its tracking server was away, on its run once the program has ended."""

from itertools import islice

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.unsent_metrics import UnsentPoint, read_unsent
from resources.errors import HanzoError
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking_rules import MetricPoint, metric_point

AT_ONCE = 1000
"""MLflow's limit of metrics in one request."""


def log_unsent(run_id: str, folder: str, control_plane: ControlPlane) -> None:
    """Log what was left in `folder`. Once more changes nothing: a point counts once, whoever brings it.

    Raises FileNotFoundError where nothing was left.
    """
    data = RunData(control_plane.database)
    points = (point for unsent in read_unsent(control_plane.store, folder) for point in valid(unsent))
    while batch := list(islice(points, AT_ONCE)):
        data.log_batch(run_id, metrics=batch)


def valid(unsent: UnsentPoint) -> list[MetricPoint]:
    """Nothing of what the server would have refused: that is dropped where it was sent, too."""
    try:
        return [metric_point(unsent.key, unsent.value, unsent.step, unsent.timestamp)]
    except HanzoError:
        return []
