"""What alembic has to know to run the chain over a connection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from alembic.config import Config

if TYPE_CHECKING:
    from sqlalchemy import Connection, MetaData

__all__ = ["configuration"]


def configuration(connection: Connection, metadata: MetaData, version_table: str) -> Config:
    """The configuration for `alembic.command`; `metadata` are the tables as the models have them."""
    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    found.attributes |= {"connection": connection, "metadata": metadata, "version_table": version_table}
    return found
