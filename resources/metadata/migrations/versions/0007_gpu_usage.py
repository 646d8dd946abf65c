"""GPUs that attempts of jobs held, metered by the control plane"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLE: tuple[sa.Column[Any], ...] = (
    sa.Column("attempt", sa.String(length=64), nullable=False),
    sa.Column("job_id", sa.String(length=256), nullable=False),
    sa.Column("program", sa.String(length=20), nullable=False),
    sa.Column("owner_id", sa.String(length=256), nullable=False),
    sa.Column("gpus", sa.Integer(), nullable=False),
    sa.Column("gpu_type", sa.String(length=100), nullable=False),
    sa.Column("started_at", sa.BigInteger(), nullable=False),
    sa.Column("metered_until", sa.BigInteger(), nullable=False),
    sa.Column("is_open", sa.Boolean(), nullable=False),
)


def upgrade() -> None:
    made = op.create_table("gpu_usage", *TABLE, sa.PrimaryKeyConstraint("attempt"))
    op.create_index("gpu_usage_by_job", "gpu_usage", ["job_id", "program", "is_open"])
    op.create_index("gpu_usage_by_owner", "gpu_usage", ["owner_id"])
    op.bulk_insert(made, read_completed_hours(op.get_bind()))


def read_completed_hours(connection: sa.Connection) -> list[dict[str, object]]:
    """What earlier releases recorded in `job.completed`: that many hours of one GPU, so that counters go on.

    Not the runs' metrics: any user may write those.
    """
    events, tags = sa.table("events"), sa.table("run_tags")
    completed = (
        sa.select(sa.column("seq"), sa.column("key"), sa.column("payload", sa.JSON), sa.column("created_at"))
        .select_from(events)
        .where(sa.column("type") == "job.completed")
        .order_by(sa.column("seq"))
    )
    is_type = sa.column("key") == "system/gpu_type"
    typed: sa.CursorResult[Any] = connection.execute(
        sa.select(sa.column("run_id"), sa.column("value")).select_from(tags).where(is_type)
    )
    types = {row.run_id: row.value for row in typed}
    rows = {}
    for seq, key, payload, created_at in connection.execute(completed):
        hours = payload.get("gpu_hours")
        if isinstance(hours, int | float) and 0 < hours < 1e9:
            rows[key] = {
                "attempt": f"event-{seq}",
                "job_id": key,
                "program": "train",
                "owner_id": key,
                "gpus": 1,
                "gpu_type": types.get(key, "unknown")[:100],
                "started_at": created_at - int(hours * 3_600_000),
                "metered_until": created_at,
                "is_open": False,
            }
    return list(rows.values())


def downgrade() -> None:
    op.drop_table("gpu_usage")
