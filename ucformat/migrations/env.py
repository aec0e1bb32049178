"""Runs revisions over the connection in the configuration, which `ucformat.catalog.database` opened and locked."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=attributes["metadata"],
    version_table=attributes["version_table"],
    render_as_batch=True,  # SQLite alters a table only by copying it
    compare_type=True,
    transaction_per_migration=False,  # all or nothing: the transaction is the caller's
)
context.run_migrations()
