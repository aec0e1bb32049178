"""When a deleted checkpoint may be purged, decided when it is deleted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; checkpoints that are deleted already get the usual grace when `gc` sees them."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.add_column(sa.Column("purge_after", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.drop_column("purge_after")
