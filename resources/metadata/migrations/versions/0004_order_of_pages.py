"""indexes by which a page of jobs, and the events about one thing, are found where there are many"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("jobs_by_organization", "jobs", ["organization", "submitted_at", "id"])
    op.create_index("jobs_by_organization_and_status", "jobs", ["organization", "status", "submitted_at", "id"])
    op.create_index("events_by_key", "events", ["key", "type", "seq"])


def downgrade() -> None:
    op.drop_index("events_by_key", "events")
    op.drop_index("jobs_by_organization_and_status", "jobs")
    op.drop_index("jobs_by_organization", "jobs")
