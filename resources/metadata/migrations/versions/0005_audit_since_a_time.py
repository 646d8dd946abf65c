"""an index by which the first of the events since a time is found"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("events_by_time", "events", ["created_at", "seq"])


def downgrade() -> None:
    op.drop_index("events_by_time", "events")
