"""What happened to a run on its way: an event for whoever listens and a tag on the run for whoever looks, once for each.

The tag is what makes it once: an equal one that is there already means that the event was written, in one transaction.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from recipes.contracts.recovery_log import Incident
from resources.metadata.outbox import emit
from resources.metadata.tables import run_tags
from resources.metadata.tracking.run_data import require_active, write_tags
from resources.run_health import Alert

TAGS = "health/"


def tell(connection: Connection, run_id: str, tag: str, value: str, type: str, facts: Mapping[str, Any]) -> bool:
    """Write the event and the tag, unless the run has an equal tag already. True when it was news.

    Raises:
        HanzoError: there is no such run, or it was deleted.
    """
    require_active(connection, run_id)  # locks its row: two who look at once do not tell it twice
    query = select(run_tags.c.value).where(run_tags.c.run_id == run_id, run_tags.c.key == tag)
    if connection.execute(query).scalar() == value:
        return False
    write_tags(connection, run_id, {tag: value})
    emit(connection, "jobs", type, run_id, {"job_id": run_id, **facts})
    return True


def tell_incidents(connection: Connection, run_id: str, incidents: Iterable[Incident]) -> None:
    """What the program has healed, each under its number in the run."""
    for number, incident in enumerate(incidents, 1):
        facts = incident.model_dump(mode="json", exclude={"kind"}) | {"message": incident.words}
        tell(connection, run_id, f"{TAGS}incident_{number}", incident.words, f"job.{incident.kind}", facts)


def tell_alert(connection: Connection, run_id: str, alert: Alert) -> None:
    name = alert.type.removeprefix("job.")
    tell(
        connection,
        run_id,
        TAGS + name,
        f"{alert.words}, since {alert.since}",
        alert.type,
        {"message": alert.words, "since": alert.since},
    )
