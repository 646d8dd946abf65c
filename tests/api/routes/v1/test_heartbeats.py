"""GET /v1/heartbeats: components, and the age of their last heartbeat."""

from fastapi.testclient import TestClient
from sqlalchemy import update

from resources.metadata.database import Database
from resources.metadata.outbox import now_ms
from resources.metadata.tables import heartbeats
from resources.monitoring.service_heartbeats import SENSORS_NAME, Heartbeats
from resources.settings.settings import Settings


def test_heartbeats_list_each_sender_with_its_age(http: TestClient, settings: Settings) -> None:
    assert http.get("/v1/heartbeats").json() == {"heartbeats": []}
    database = Database(settings.database_url)
    Heartbeats(database).beat(SENSORS_NAME)
    with database.write() as connection:
        connection.execute(update(heartbeats).values(beat_at=now_ms() - 90_000))
    (heard,) = http.get("/v1/heartbeats").json()["heartbeats"]
    assert heard["name"] == "sensors" and heard["seconds_ago"] >= 90
    Heartbeats(database).beat(SENSORS_NAME)
    database.close()
    (again,) = http.get("/v1/heartbeats").json()["heartbeats"]
    assert again["beat_at"] > heard["beat_at"]
