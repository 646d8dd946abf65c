"""All parts of tracking over one database, as one object."""

from contextlib import AbstractContextManager

from sqlalchemy import Connection

from resources.metadata.database import Database
from resources.metadata.tracking.experiment_search import ExperimentSearch
from resources.metadata.tracking.experiments import Experiments
from resources.metadata.tracking.logged_model_search import LoggedModelSearch
from resources.metadata.tracking.logged_models import LoggedModels
from resources.metadata.tracking.metrics import Metrics, MetricSampling
from resources.metadata.tracking.run_data import ModelHistory, RunData
from resources.metadata.tracking.run_inputs import Inputs
from resources.metadata.tracking.run_revisions import RenderingCache
from resources.metadata.tracking.run_search import RunSearch
from resources.metadata.tracking.runs import Runs


class Tracking:
    """The parts of tracking, whose methods accept a `connection` to join a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.experiments = Experiments(database)
        self.experiment_search = ExperimentSearch(database)
        self.runs = Runs(database)
        self.run_data = RunData(database)
        self.run_search = RunSearch(database)
        self.renderings = RenderingCache()
        self.metrics = Metrics(database)
        self.metric_sampling = MetricSampling(database)
        self.inputs = Inputs(database)
        self.logged_models = LoggedModels(database)
        self.model_history = ModelHistory(database)
        self.logged_model_search = LoggedModelSearch(database)

    def read(self) -> AbstractContextManager[Connection]:
        """Open a connection for reading: cheaper than `write`, because it needs no transaction."""
        return self._database.read()

    def write(self) -> AbstractContextManager[Connection]:
        """Open a transaction over several of the parts."""
        return self._database.write()
