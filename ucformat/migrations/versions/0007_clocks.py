"""What other clocks than the host's showed when a checkpoint was deleted, so that one that is wrong ends no grace."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    """Add the column; what is deleted already goes by the host's clock."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.add_column(sa.Column("deleted_clocks", DOCUMENT, nullable=True))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("checkpoint") as batch:
        batch.drop_column("deleted_clocks")
