"""Quotas of organizations."""

from tests.support.sensors.sensor_house import House


def set_quotas(house: House, quotas: str) -> None:
    (house.folder / "home" / "config.yaml").write_text(quotas)
    house.plane.__dict__.pop("settings", None)
