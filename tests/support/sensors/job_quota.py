"""Quotas of organizations."""

from tests.support.sensors.sensor_harness import SensorHarness


def set_quotas(harness: SensorHarness, quotas: str) -> None:
    (harness.folder / "home" / "config.yaml").write_text(quotas)
    harness.plane.__dict__.pop("settings", None)
