"""Databases that hold the rows of `world`, once for all tests of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine

from tests.catalog.filter.world import WORLDS, store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

    from tests.catalog.databases import Postgres


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.matrix)]
)
def worlds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Connection]]:
    """A connection to a database of each of `WORLDS`."""
    server: Postgres | None = None
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres_server")
    folder = tmp_path_factory.mktemp("worlds")
    urls = {seed: server.fresh() if server else f"sqlite:///{folder}/{seed}.db" for seed in WORLDS}
    engines = {seed: create_engine(url) for seed, url in urls.items()}
    for seed, engine in engines.items():
        store(engine, WORLDS[seed])
    connections = {seed: engine.connect() for seed, engine in engines.items()}
    yield connections
    for seed, engine in engines.items():
        connections[seed].close()
        engine.dispose()
        if server:
            server.drop(urls[seed])
