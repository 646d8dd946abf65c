"""Define a sensor as a function of the context and the control plane."""

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane

SensorFunction = Callable[[dg.SensorEvaluationContext, ControlPlane], dg.SensorResult]


@dataclass(frozen=True)
class Sensor:
    """What `sensor` makes of a look. `interval` in seconds; with `requests_runs`, it may ask for runs of any asset."""

    function: SensorFunction
    interval: int
    description: str
    requests_runs: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    def on(self, control_plane: ControlPlane) -> dg.SensorDefinition:
        """As Dagster knows it; it keeps the control plane between its looks."""

        def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            return self.function(context, control_plane)

        return dg.SensorDefinition(
            name=self.name,
            evaluation_fn=evaluate,
            minimum_interval_seconds=self.interval,
            description=self.description,
            asset_selection=dg.AssetSelection.all() if self.requests_runs else None,
            default_status=dg.DefaultSensorStatus.RUNNING,
        )


def sensor(*, interval: int, description: str, requests_runs: bool = True) -> Callable[[SensorFunction], Sensor]:
    """Makes a sensor of a function of that name."""
    return lambda function: Sensor(function, interval, description, requests_runs)
