"""A sensor before it is anybody's: what it looks at, and how often; the code location gives it its control plane.

As a Dagster resource the control plane would be handed over with an instance of Dagster, whose database is opened and
checked anew for each look: that was four fifths of what a look cost. So it is handed over here, and `context.instance` is
opened by those looks alone that ask for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

from hanzo_ml_assets.control_plane import ControlPlane

Look = Callable[[dg.SensorEvaluationContext, ControlPlane], dg.SensorResult]


@dataclass(frozen=True)
class Sensor:
    """What `sensor` makes of a look. `interval` in seconds; with `requests_runs`, it may ask for runs of any asset."""

    look: Look
    interval: int
    description: str
    requests_runs: bool

    @property
    def name(self) -> str:
        return self.look.__name__

    def on(self, control_plane: ControlPlane) -> dg.SensorDefinition:
        """As Dagster knows it; it keeps the control plane between its looks."""

        def evaluate(context: dg.SensorEvaluationContext) -> dg.SensorResult:
            return self.look(context, control_plane)

        return dg.SensorDefinition(
            name=self.name,
            evaluation_fn=evaluate,
            minimum_interval_seconds=self.interval,
            description=self.description,
            asset_selection=dg.AssetSelection.all() if self.requests_runs else None,
            default_status=dg.DefaultSensorStatus.RUNNING,
        )


def sensor(*, interval: int, description: str, requests_runs: bool = True) -> Callable[[Look], Sensor]:
    """Makes a sensor of a function of that name."""
    return lambda look: Sensor(look, interval, description, requests_runs)
