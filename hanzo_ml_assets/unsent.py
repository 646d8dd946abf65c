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
    there, at another time. Of a step that it did otherwise than the first time, values of that do not count.

    Raises FileNotFoundError where nothing was left.
    """
    data, logged = RunData(control_plane.database), Metrics(control_plane.database)
    unsent = [point for point in read_unsent(control_plane.store, folder) if is_valid(point)]
    there = {key: newest_times(logged, run_id, key) for key in {point.key for point in unsent}}
    missing = (point for point in unsent if is_missing(point, there[point.key].get(point.step)))
    points = (metric_point(point.key, point.value, point.step, point.timestamp) for point in missing)
    while batch := list(islice(points, AT_ONCE)):
        data.log_batch(run_id, metrics=batch)


def is_missing(unsent: UnsentPoint, newest: int | None) -> bool:
    """Whether the run has not got it: the `newest` value of its step (ms since 1970), if any, is of the first time."""
    return newest is None or (unsent.anew and (unsent.since is None or newest <= unsent.since))


def newest_times(logged: Metrics, run_id: str, key: str) -> dict[int, int]:
    """When (ms since 1970) the newest value of that key at each step is from."""
    found: dict[int, int] = {}
    token = None
    while True:
        page = logged.history(run_id, key, PAGE, token)
        for point in page.points:
            found[point.step] = max(point.timestamp, found.get(point.step, point.timestamp))
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
