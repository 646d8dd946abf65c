"""files of deployments, and reports of the engine's replicas"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployment_files",
        sa.Column("deployment_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("smoke_prompts", sa.JSON(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("deployment_id"),
    )
    op.create_table(
        "engine_replicas",
        sa.Column("id", sa.String(length=250), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("reported_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def downgrade() -> None:
    op.drop_table("engine_replicas")
    op.drop_table("deployment_files")
