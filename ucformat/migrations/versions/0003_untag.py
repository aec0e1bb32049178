"""Tags that can be taken off, those that cannot, and those that were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and the table; what was tagged before can be taken off."""
    with op.batch_alter_table("tag") as batch:
        batch.add_column(sa.Column("permanent", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "untag",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("removed", sa.DateTime(timezone=True), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_untag_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint", "name", name="pk_untag"),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("untag")
    with op.batch_alter_table("tag") as batch:
        batch.drop_column("permanent")
