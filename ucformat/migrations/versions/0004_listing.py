"""What the files of a place were when the checkpoint there was read, so that it is not read again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; each place is read once more."""
    with op.batch_alter_table("location") as batch:
        batch.add_column(sa.Column("listing", sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("location") as batch:
        batch.drop_column("listing")
