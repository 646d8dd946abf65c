"""when an attempt last saved a checkpoint"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job_attempts", sa.Column("saved_at", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("job_attempts", "saved_at")
