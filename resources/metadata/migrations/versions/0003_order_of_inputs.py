"""the order in which a run's inputs and models were logged; models of a run that this server does not know"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NAMES = {"fk": "%(table_name)s_%(column_0_name)s_fkey"}
"""As PostgreSQL names what the first migration left without a name: SQLite has no name to drop it by."""


def upgrade() -> None:
    # Rows of before share the first place: among each other they come in the order that they came in before.
    op.add_column("run_inputs", sa.Column("place", sa.Integer(), nullable=False, server_default=sa.text("0")))
    with op.batch_alter_table("run_models", naming_convention=NAMES) as batch_op:
        batch_op.add_column(sa.Column("place", sa.Integer(), nullable=False, server_default=sa.text("0")))
        batch_op.drop_constraint("run_models_model_id_fkey", type_="foreignkey")


def downgrade() -> None:
    op.execute("DELETE FROM run_models WHERE model_id NOT IN (SELECT id FROM logged_models)")
    with op.batch_alter_table("run_models") as batch_op:
        batch_op.create_foreign_key("run_models_model_id_fkey", "logged_models", ["model_id"], ["id"])
        batch_op.drop_column("place")
    op.drop_column("run_inputs", "place")
