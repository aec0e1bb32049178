"""Catalogs of both databases, of checkpoints that are nowhere."""

from tests.catalog.conftest import (
    catalog,
    database_url,
    engine_name,
    postgres_server,
    sqlite_catalog,
)

__all__ = ["catalog", "database_url", "engine_name", "postgres_server", "sqlite_catalog"]
