"""counted calls, problems of datasets, positions of readers"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "call_tallies",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("taken_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        postgresql_with={"fillfactor": 50},
        sqlite_with_rowid=False,
    )
    op.create_table(
        "dataset_problems",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("told_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["dataset_versions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("dataset_id"),
    )
    op.create_table(
        "event_positions",
        sa.Column("reader", sa.String(length=100), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("reader"),
    )


def downgrade() -> None:
    op.drop_table("event_positions")
    op.drop_table("dataset_problems")
    op.drop_table("call_tallies")
