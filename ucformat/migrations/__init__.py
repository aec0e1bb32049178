"""The one alembic chain of the catalog's tables, for SQLite and PostgreSQL alike.

A new revision: change `catalog/models.py`, write a file in `versions/` as the others are, and add its number to
`KNOWN`; `tests/catalog/test_migrations.py` says what the models have and the chain has not. Revisions never import the
models, which change under them.
"""

__all__ = ["HEAD", "KNOWN"]

#: The revisions, oldest first, and the last of them: what this version of ucformat works with.
KNOWN = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
HEAD = KNOWN[-1]
