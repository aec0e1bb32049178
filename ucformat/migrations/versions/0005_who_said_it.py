"""Which place's document said what, and what the manifests of a checkpoint are, so that no other takes its id."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLES = ("alias", "hold", "metric", "note", "tag", "untag")
TIMES = ("deleted", "purge_after")


def upgrade() -> None:
    """Add the columns and the table; what is there already was said here, and manifests are noted when next seen."""
    for table in TABLES:
        with op.batch_alter_table(table) as batch:
            batch.add_column(sa.Column("said_at", sa.Text(), nullable=True))
    with op.batch_alter_table("checkpoint") as batch:
        batch.add_column(sa.Column("content", sa.Text(), nullable=True))
    with op.batch_alter_table("location") as batch:
        for name in TIMES:
            batch.add_column(sa.Column(name, sa.DateTime(timezone=True), nullable=True))
        batch.add_column(sa.Column("spared", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "alias_claim",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("said_at", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("moved", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_alias_claim_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint", "name", "said_at", name="pk_alias_claim"),
    )
    op.create_table(
        "form",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_form_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint", "manifest", name="pk_form"),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("form")
    op.drop_table("alias_claim")
    with op.batch_alter_table("location") as batch:
        batch.drop_column("spared")
        for name in TIMES:
            batch.drop_column(name)
    with op.batch_alter_table("checkpoint") as batch:
        batch.drop_column("content")
    for table in TABLES:
        with op.batch_alter_table(table) as batch:
            batch.drop_column("said_at")
