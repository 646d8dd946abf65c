"""What a training program measured while its tracking server was away, on its run once the program has ended."""

from itertools import islice

from hanzo_ml_assets.control_plane import ControlPlane
from recipes.unsent_metrics import UnsentPoint, read_unsent
from resources.errors import HanzoError
from resources.metadata.tracking.metrics import Metrics
from resources.metadata.tracking.run_data import RunData
from resources.metadata.tracking_rules import metric_point

AT_ONCE = 1000
"""MLflow's limit of metrics in one request."""
PAGE = 25_000
"""Its limit of points in one page of a history."""


def log_unsent(run_id: str, folder: str, control_plane: ControlPlane) -> None:
    """Log what was left in `folder`, each step once: one that the run did again after a kill, and could not ask for, may be
    there, at another time.

    Raises FileNotFoundError where nothing was left.
    """
    data, logged = RunData(control_plane.database), Metrics(control_plane.database)
    unsent = [point for point in read_unsent(control_plane.store, folder) if is_valid(point)]
    there = {key: steps_of(logged, run_id, key) for key in {point.key for point in unsent}}
    missing = (point for point in unsent if point.anew or point.step not in there[point.key])
    points = (metric_point(point.key, point.value, point.step, point.timestamp) for point in missing)
    while batch := list(islice(points, AT_ONCE)):
        data.log_batch(run_id, metrics=batch)


def steps_of(logged: Metrics, run_id: str, key: str) -> set[int]:
    """At which a run has a value of that key."""
    found: set[int] = set()
    token = None
    while True:
        page = logged.history(run_id, key, PAGE, token)
        found.update(point.step for point in page.points)
        token = page.next_page_token
        if token is None:
            return found


def is_valid(unsent: UnsentPoint) -> bool:
    """False for what the server would have refused: that is dropped where it is sent, too."""
    try:
        metric_point(unsent.key, unsent.value, unsent.step, unsent.timestamp)
    except HanzoError:
        return False
    return True
