"""Revisions of the catalog's tables, by Alembic, for SQLite and PostgreSQL alike.

An empty database gets today's tables from `catalog/models.py` and is stamped with the last
revision; revisions only upgrade databases of earlier releases. To add one: change the models, and
write a file in `versions/` whose name begins with its number. Revisions never import the models,
which change after them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection, MetaData

__all__ = ["HEAD", "KNOWN", "configuration"]

#: The revisions, oldest first, and the last of them: what this version of ucformat works with.
KNOWN = tuple(
    str(int(file.name[:4])) for file in sorted(Path(__file__).parent.glob("versions/[0-9]*.py"))
)
HEAD = KNOWN[-1]


def configuration(connection: Connection, metadata: MetaData, version_table: str) -> Config:
    """The configuration for `alembic.command`."""
    from alembic.config import Config

    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    found.attributes |= {
        "connection": connection,
        "metadata": metadata,
        "version_table": version_table,
    }
    return found
