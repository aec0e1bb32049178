"""The catalog."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

UTC_TIME = sa.DateTime(timezone=True)
DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "catalog",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_catalog"),
    )
    op.create_table(
        "config",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_config"),
        sa.UniqueConstraint("hash", name="uq_config_hash"),
    )
    op.create_table(
        "digest",
        sa.Column("block", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
        sa.Column("checkpoint", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("block", "digest", "checkpoint", "position", name="pk_digest"),
        sqlite_with_rowid=False,
    )

    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
        sa.UniqueConstraint("name", name="uq_run_name"),
    )
    op.create_table(
        "tensor_set",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tensor_set"),
        sa.UniqueConstraint("hash", name="uq_tensor_set_hash"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("serial", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.Column("recorded", UTC_TIME, nullable=False),
        sa.Column("deleted", UTC_TIME, nullable=True),
        sa.Column("tensors", sa.Integer(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=True),
        sa.Column("files_nbytes", sa.BigInteger(), nullable=True),
        sa.Column("format_version", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Text(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=True),
        sa.Column("producer", DOCUMENT, nullable=False),
        sa.Column("topology", DOCUMENT, nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=True),
        sa.Column("tensor_set_id", sa.Integer(), nullable=False),
        sa.Column("digest_block", sa.Integer(), nullable=False),
        sa.Column("document_revision", sa.Integer(), nullable=False),
        sa.Column("document_written", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name="fk_checkpoint_config_id_config"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_checkpoint_run_id_run"),
        sa.ForeignKeyConstraint(["tensor_set_id"], ["tensor_set.id"], name="fk_checkpoint_tensor_set_id_tensor_set"),
        sa.PrimaryKeyConstraint("serial", name="pk_checkpoint"),
        sa.UniqueConstraint("id", name="uq_checkpoint_id"),
    )
    op.create_index("ix_checkpoint_config_id", "checkpoint", ["config_id"])
    op.create_index("ix_checkpoint_digest_block", "checkpoint", ["digest_block"])
    op.create_index("ix_checkpoint_run_id_step", "checkpoint", ["run_id", "step"])
    op.create_index("ix_checkpoint_state_created", "checkpoint", ["state", "created"])
    op.create_index("ix_checkpoint_tensor_set_id", "checkpoint", ["tensor_set_id"])

    op.create_table(
        "tensor",
        sa.Column("tensor_set_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("chunk", sa.Text(), nullable=True),
        sa.Column("shard", sa.Text(), nullable=True),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tensor_set_id"], ["tensor_set.id"], name="fk_tensor_tensor_set_id_tensor_set", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tensor_set_id", "position", name="pk_tensor"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_tensor_name_state", "tensor", ["name", "state"])

    op.create_table(
        "alias",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("moved", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_alias_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("name", name="pk_alias"),
    )
    op.create_index("ix_alias_checkpoint", "alias", ["checkpoint"])

    op.create_table(
        "alias_move",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("source", sa.Integer(), nullable=True),
        sa.Column("target", sa.Integer(), nullable=True),
        sa.Column("moved", UTC_TIME, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["source"], ["checkpoint.serial"], name="fk_alias_move_source_checkpoint", ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(
            ["target"], ["checkpoint.serial"], name="fk_alias_move_target_checkpoint", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_alias_move"),
    )
    op.create_index("ix_alias_move_name_version", "alias_move", ["name", "version"], unique=True)
    op.create_index("ix_alias_move_source", "alias_move", ["source"])
    op.create_index("ix_alias_move_target", "alias_move", ["target"])

    op.create_table(
        "edge",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("child", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("parent_url", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("depends", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["child"], ["checkpoint.serial"], name="fk_edge_child_checkpoint", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["parent"], ["checkpoint.serial"], name="fk_edge_parent_checkpoint", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_edge"),
    )
    op.create_index("ix_edge_child_kind_parent_url", "edge", ["child", "kind", "parent_url"], unique=True)
    op.create_index("ix_edge_parent", "edge", ["parent"])
    op.create_index("ix_edge_parent_id", "edge", ["parent_id"])
    op.create_index("ix_edge_parent_url", "edge", ["parent_url"])

    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", UTC_TIME, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=True),
        sa.Column("detail", DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_event_checkpoint_checkpoint", ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
    )
    op.create_index("ix_event_checkpoint", "event", ["checkpoint"])

    op.create_table(
        "hold",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("until", UTC_TIME, nullable=True),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("released", UTC_TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_hold_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_hold"),
    )
    op.create_index("ix_hold_checkpoint", "hold", ["checkpoint"])

    op.create_table(
        "location",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("seen", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_location_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_location"),
        sa.UniqueConstraint("url", name="uq_location_url"),
    )
    op.create_index("ix_location_checkpoint", "location", ["checkpoint"])

    op.create_table(
        "metric",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Float(53), nullable=True),
        sa.Column("measured", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_metric_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint", "name", name="pk_metric"),
    )
    op.create_index("ix_metric_name_value", "metric", ["name", "value"])

    op.create_table(
        "note",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_note_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_note"),
    )
    op.create_index("ix_note_checkpoint", "note", ["checkpoint"])

    op.create_table(
        "tag",
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created", UTC_TIME, nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_tag_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("checkpoint", "name", name="pk_tag"),
    )
    op.create_index("ix_tag_name", "tag", ["name"])

    op.create_table(
        "verification",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("checkpoint", sa.Integer(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("at", UTC_TIME, nullable=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.Column("bytes_verified", sa.BigInteger(), nullable=False),
        sa.Column("bytes_unverified", sa.BigInteger(), nullable=False),
        sa.Column("problems", DOCUMENT, nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint"], ["checkpoint.serial"], name="fk_verification_checkpoint_checkpoint", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_verification"),
    )
    op.create_index("ix_verification_checkpoint", "verification", ["checkpoint"])


def downgrade() -> None:
    """There is nothing before it."""
    raise NotImplementedError("the first revision cannot be taken back: delete the database instead")
