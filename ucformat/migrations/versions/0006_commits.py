"""What each checkpoint counts among the commits of its training."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; no checkpoint that is there already has a count."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.add_column(sa.Column("commits", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.drop_column("commits")
