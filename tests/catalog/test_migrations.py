"""The tables that are made, and the chain of revisions, on both engines."""

from __future__ import annotations

import multiprocessing
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from tests.catalog.manifests import manifest
from ucformat import migrations
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.database import VERSION_TABLE, Database
from ucformat.catalog.models import Base
from ucformat.errors import NotFound, PermissionDenied, UpgradeNeeded
from ucformat.migrations import HEAD, KNOWN, configuration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alembic.config import Config
    from sqlalchemy import Connection


def config(connection: Connection) -> Any:
    return configuration(connection, Base.metadata, VERSION_TABLE)


_TOY = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "toy", {HEAD!r}, None, None


def upgrade():
    with op.batch_alter_table("checkpoint") as batch:
        batch.add_column(sa.Column("toy", sa.Integer(), nullable=False, server_default="7"))
"""


@contextmanager
def next_release(folder: Path) -> Iterator[None]:
    """In the block, ucformat has one more revision, whose scripts are in this folder."""
    if not folder.exists():
        shutil.copytree(Path(migrations.__file__).parent, folder)
        (folder / "versions" / "toy.py").write_text(_TOY, encoding="utf-8")

    def found(*args: Any) -> Config:
        made = configuration(*args)
        made.set_main_option("script_location", str(folder))
        return made

    with patch.multiple(
        "ucformat.catalog.database", HEAD="toy", KNOWN=(*KNOWN, "toy"), configuration=found
    ):
        yield


def filled(url: str) -> None:
    """A catalog of this release, with data."""
    with Catalog(url) as catalog:
        catalog.record(manifest(1), "/data/1")
        catalog.record(manifest(2, step=9), "/data/2")
        catalog.tag("run7@0", "good")
        catalog.link("run7@0", "/data/2", "convert")


def test_the_chain_is_what_the_package_says_it_is() -> None:
    with sa.create_engine("sqlite://").connect() as connection:
        script = ScriptDirectory.from_config(config(connection))
    assert script.get_heads() == [HEAD]
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == KNOWN


def test_models_and_chain_agree(empty_database_url: str) -> None:
    """A database of the first release becomes what today's models make of an empty one."""
    engine = sa.create_engine(empty_database_url)
    tables = Path(__file__).parent / "first_release" / f"{engine.dialect.name}.sql"
    with engine.begin() as connection:
        for statement in tables.read_text().split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        command.stamp(config(connection), KNOWN[0])
    engine.dispose()
    database = Database(empty_database_url, upgrade=True)
    assert database.revision == HEAD
    with database.engine.connect() as connection:
        command.check(config(connection))
    database.close()


def test_every_foreign_key_has_an_index(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    inspector = sa.inspect(database.engine)
    keys = 0
    for table in Base.metadata.tables:
        first = {i["column_names"][0] for i in inspector.get_indexes(table)}
        first.add(inspector.get_pk_constraint(table)["constrained_columns"][0])
        for key in inspector.get_foreign_keys(table):
            keys += 1
            assert key["constrained_columns"][0] in first, (table, key)
    assert keys > 10
    database.close()


def test_an_older_database_waits_for_an_upgrade_that_keeps_its_data(
    empty_database_url: str, tmp_path: Path
) -> None:
    filled(empty_database_url)
    with next_release(tmp_path / "scripts"):
        with pytest.raises(UpgradeNeeded, match="older") as caught:
            Database(empty_database_url)
        assert "ucp catalog upgrade" in str(caught.value.hint)

        with Catalog(empty_database_url, upgrade=True) as catalog:
            entry = catalog.get("run7@0")
            assert (entry.urls, entry.tags) == (("/data/1",), ("good",))
            assert catalog.lineage(entry.id).edges
            with catalog.database.reading() as connection:
                assert connection.execute(
                    sa.text("select distinct toy from checkpoint")
                ).scalars().all() == [7]
            catalog.record(manifest(3), "/data/3")
        Database(empty_database_url).close()  # and nothing more to do


def test_a_newer_database_is_only_read(empty_database_url: str) -> None:
    with Catalog(empty_database_url) as catalog:
        catalog.record(manifest(1), "/data/1")
        with catalog.database.writing() as connection:
            connection.execute(sa.text(f"update {VERSION_TABLE} set version_num = 'future'"))  # noqa: S608

    with Catalog(empty_database_url) as catalog:
        assert catalog.count() == 1
        with pytest.raises(UpgradeNeeded, match="newer ucformat") as caught:
            catalog.tag("run7@0", "x")
        assert "pip install --upgrade" in str(caught.value.hint)


def test_tables_of_somebody_else_are_left_alone(empty_database_url: str) -> None:
    engine = sa.create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("create table run (name text)"))
    with pytest.raises(PermissionDenied, match="'run' that is not ucformat's"):
        Database(empty_database_url)
    assert sa.inspect(engine).get_table_names() == ["run"]
    engine.dispose()


def test_one_that_is_killed_while_upgrading_leaves_the_database_as_it_was(
    empty_database_url: str, tmp_path: Path
) -> None:
    filled(empty_database_url)
    scripts = tmp_path / "scripts"
    with next_release(scripts):
        process = multiprocessing.get_context("spawn").Process(
            target=_upgrade_and_die, args=(empty_database_url, scripts)
        )
        process.start()
        process.join()
        assert process.exitcode == 9
        with pytest.raises(UpgradeNeeded):
            Database(empty_database_url)
        with Catalog(empty_database_url, upgrade=True) as catalog:
            assert catalog.get("run7@0").tags == ("good",)


def _upgrade_and_die(url: str, scripts: Path) -> None:
    import os

    from ucformat.catalog import database as module

    real = module._migrate

    def migrate_and_die(connection: Connection) -> None:
        real(connection)
        os._exit(9)

    module._migrate = migrate_and_die
    with next_release(scripts):
        Database(url, upgrade=True)


def test_many_that_come_to_an_empty_database_make_it_once(empty_database_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(6) as pool:
        ids = pool.map(_identity, [empty_database_url] * 12)
    assert len(set(ids)) == 1


def _identity(url: str) -> str:
    database = Database(url)
    with database.reading() as connection:
        found = connection.execute(sa.text("select id from catalog")).scalars().all()
    database.close()
    assert len(found) == 1
    return str(found[0])


def test_two_that_upgrade_at_once_both_end_well(empty_database_url: str, tmp_path: Path) -> None:
    filled(empty_database_url)
    scripts = tmp_path / "scripts"
    with next_release(scripts), multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.starmap(_upgrade, [(empty_database_url, scripts)] * 8) == ["toy"] * 8


def _upgrade(url: str, scripts: Path) -> str:
    with next_release(scripts):
        database = Database(url, upgrade=True)
        found = database.revision
        database.close()
        return found


def test_a_catalog_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no catalog"):
        Database(f"sqlite:///{tmp_path}/new/catalog.db", read_only=True)
