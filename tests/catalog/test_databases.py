"""The databases of the tests are what they say they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import create_engine, inspect, make_url, text

from ucformat.catalog.models import Base

if TYPE_CHECKING:
    from tests.catalog.databases import Postgres


def test_a_database_is_fresh_and_takes_the_tables(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    assert inspect(engine).get_table_names() == []
    Base.metadata.create_all(engine)
    assert "checkpoint" in inspect(engine).get_table_names()
    engine.dispose()


def test_postgresql_is_postgresql(postgres_server: Postgres) -> None:
    one, other = postgres_server.fresh(), postgres_server.fresh()
    assert one != other
    assert one.startswith("postgresql+psycopg://")
    engine = create_engine(one)
    with engine.connect() as connection:
        assert str(connection.scalar(text("SELECT version()"))).startswith("PostgreSQL ")
    engine.dispose()
    postgres_server.drop(one)
    assert make_url(one).database not in postgres_server.made
    assert make_url(other).database in postgres_server.made
