"""Controller of jobs on a cluster: `python -m resources.compute.kubernetes.controller`.

The only writer of a job's objects and its phase. It reconciles once a second and after each change. All its state is in the
API server and the database: it may be killed between any two calls. Of several instances one is the leader (`leader`).
"""

import logging
import signal
import sys
import threading
from functools import partial
from types import FrameType

from sqlalchemy.exc import SQLAlchemyError

from recipes.contracts.job import EXIT_BAD_CONFIGURATION, BadConfiguration
from resources.compute.kubernetes.cluster import Cluster, ClusterError, open_cluster
from resources.compute.kubernetes.controller.leader import LeadershipLost, RowLocked, lead
from resources.compute.kubernetes.controller.reconciler import Reconciler
from resources.compute.kubernetes.view import ClusterView
from resources.jobs.program_tokens import ClusterCredentials
from resources.service_logs import configure_logs
from resources.settings.settings import Settings
from resources.stack.liveness import liveness_file, report_alive

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.1
"""Minimum time between two passes, which batches simultaneous changes."""


def control(
    settings: Settings, view: ClusterView, cluster: Cluster, changed: threading.Event, stopped: threading.Event
) -> None:
    """Lead until leadership is lost or `stopped` is set."""
    connect_seconds = settings.database.connect_seconds
    lock_file = settings.home / "controller.lock"
    still_alive = partial(report_alive, liveness_file(settings.home, "controller"))
    with lead(settings.database_url, connect_seconds, lock_file, stopped, waiting=still_alive) as database:
        log.info("leading")
        reconciler = Reconciler(cluster, view, settings.scheduler, database, ClusterCredentials(database))
        while not stopped.is_set():
            changed.clear()
            try:
                # With outdated mirrors, the pods of running attempts would seem to be gone.
                again = reconciler.reconcile() if view.is_current else False
            except (SQLAlchemyError, RowLocked) as problem:
                log.warning("the database does not answer, will retry: %s", problem)
                again = False
            still_alive()
            stopped.wait(MIN_INTERVAL_SECONDS)
            if not again:
                changed.wait(INTERVAL_SECONDS - MIN_INTERVAL_SECONDS)


def run(settings: Settings, stopped: threading.Event) -> None:
    """Run the controller until it is stopped; retry all failures."""
    changed = threading.Event()
    cluster = open_cluster(settings.scheduler.kubeconfig)
    view = ClusterView(cluster, settings.scheduler.gang_backend, changed.set)
    view.start()
    while not stopped.is_set():
        try:
            control(settings, view, cluster, changed, stopped)
        except LeadershipLost as problem:
            log.warning("leadership lost: %s", problem)


def main() -> int:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        settings = Settings.load()
        configure_logs(settings.logging.level, settings.logging.format)
        run(settings, stopped)
    except (BadConfiguration, ClusterError) as problem:
        print(f"hanzo-ml: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
