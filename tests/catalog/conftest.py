"""Databases for the tests of the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.catalog.databases import Postgres, running_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A real PostgreSQL; `postgres_server.fresh()` is the url of a new, empty database."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The url of a fresh, empty database, of each engine in turn."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/catalog.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    url = server.fresh()
    yield url
    server.drop(url)
