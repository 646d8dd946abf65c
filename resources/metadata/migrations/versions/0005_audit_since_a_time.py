"""index to find the first event since a time"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("events_by_time", "events", ["created_at", "seq"])


def downgrade() -> None:
    op.drop_index("events_by_time", "events")
