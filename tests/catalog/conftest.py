"""Databases for the tests of the catalog."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.catalog.databases import Postgres, running_postgres
from tests.catalog.manifests import BEGIN
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes documents: the places of these checkpoints are made up."""
    monkeypatch.setattr("ucformat.catalog.catalog.on_change", [])


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A real PostgreSQL; `postgres_server.fresh()` is the url of a new, empty database."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.matrix)])
def engine_name(request: pytest.FixtureRequest) -> str:
    """SQLite, and in the second tier PostgreSQL too."""
    return str(request.param)


@pytest.fixture(scope="session")
def sqlite_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty catalog, which others are copies of."""
    file = tmp_path_factory.mktemp("sqlite") / "catalog.db"
    with Catalog(f"sqlite:///{file}") as catalog:
        catalog.find()
    return file


@pytest.fixture
def database_url(engine_name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The url of the database of a new, empty catalog, of each engine in turn."""
    if engine_name == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_catalog"), tmp_path)
        yield f"sqlite:///{tmp_path}/catalog.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    url = server.fresh_catalog()
    yield url
    server.drop(url)


@pytest.fixture
def empty_database_url(
    engine_name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[str]:
    """The url of a new database without tables, of each engine in turn."""
    if engine_name == "sqlite":
        yield f"sqlite:///{tmp_path}/catalog.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    url = server.fresh()
    yield url
    server.drop(url)


@pytest.fixture
def catalog(database_url: str) -> Iterator[Catalog]:
    """An empty catalog, on each engine in turn."""
    with Catalog(database_url) as opened:
        yield opened


class Clock:
    """The time of all catalogs, which only passes when it is told to."""

    def __init__(self) -> None:
        self.now = BEGIN + timedelta(days=100)

    def __call__(self) -> datetime:
        return self.now

    def wait(self, **span: float) -> None:
        self.now += timedelta(**span)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("ucformat.catalog.stamp.now", made)
    monkeypatch.setattr("ucformat.catalog.stamp.CLOCKS", [])
    return made
