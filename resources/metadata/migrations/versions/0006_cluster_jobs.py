"""jobs on a cluster, their attempts, and the tokens of their pods"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cluster_jobs",
        sa.Column("job_id", sa.String(length=256), nullable=False),
        sa.Column("program", sa.String(length=20), nullable=False),
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("wanted", sa.String(length=20), nullable=False),
        sa.Column("phase", sa.String(length=20), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("queue_position", sa.Integer(), nullable=True),
        sa.Column("admitted_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "program"),
    )
    op.create_index("cluster_jobs_by_phase", "cluster_jobs", ["phase", "created_at"])
    op.create_table(
        "job_attempts",
        sa.Column("job_id", sa.String(length=256), nullable=False),
        sa.Column("program", sa.String(length=20), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("claimed_by", sa.String(length=64), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("counted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "program", "attempt"),
    )
    op.create_index("job_attempts_by_pod", "job_attempts", ["job_id", "program", "claimed_by"], unique=True)
    op.create_table(
        "program_tokens",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=256), nullable=False),
        sa.Column("program", sa.String(length=20), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_index("program_tokens_by_job", "program_tokens", ["job_id", "program"])


def downgrade() -> None:
    op.drop_table("program_tokens")
    op.drop_table("job_attempts")
    op.drop_table("cluster_jobs")
