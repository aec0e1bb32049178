"""The chain of revisions, on both engines."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from tests.catalog.manifests import manifest
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.database import VERSION_TABLE, Database
from ucformat.catalog.models import Base
from ucformat.errors import NotFound, PermissionDenied, UpgradeNeeded
from ucformat.migrations import HEAD, KNOWN
from ucformat.migrations.config import configuration

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection


def config(connection: Connection) -> Any:
    return configuration(connection, Base.metadata, VERSION_TABLE)


def made_by(url: str, revision: str) -> sa.Engine:
    """A database as an older ucformat left it."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        command.upgrade(config(connection), revision)
    return engine


def with_data(engine: sa.Engine) -> None:
    """Rows of the first revision, written as that one did."""
    rows: dict[str, dict[str, Any]] = {
        "catalog": {"id": "c", "created": "2026-01-01 00:00:00"},
        "run": {"id": 1, "name": "run7", "created": "2026-01-01 00:00:00"},
        "tensor_set": {"id": 1, "hash": "h"},
        "checkpoint": {
            "serial": 1,
            "id": "ab" * 16,
            "kind": "ucformat",
            "state": "deleted",
            "run_id": 1,
            "step": 5,
            "created": "2026-01-01 00:00:00",
            "recorded": "2026-01-01 00:00:00",
            "tensors": 0,
            "nbytes": 0,
            "producer": "{}",
            "topology": '{"zero": 3}',
            "tensor_set_id": 1,
            "digest_block": 0,
            "document_revision": 0,
            "document_written": 0,
        },
        "tag": {"checkpoint": 1, "name": "good", "created": "2026-01-01 00:00:00", "who": "me"},
        "edge": {"id": 1, "child": 1, "parent": 1, "parent_url": "/x", "kind": "convert", "depends": False},
    }
    with engine.begin() as connection:
        for table, row in rows.items():
            marks = ", ".join(f":{k}" for k in row)
            connection.execute(sa.text(f"insert into {table} ({', '.join(row)}) values ({marks})"), row)  # noqa: S608
            for key in {"id", "serial"} & {k for k, v in row.items() if v == 1}:
                if engine.dialect.name == "postgresql":  # which counts only what it numbers itself
                    connection.execute(sa.select(sa.func.setval(sa.func.pg_get_serial_sequence(table, key), 1)))


def test_the_chain_is_what_the_package_says_it_is() -> None:
    with sa.create_engine("sqlite://").connect() as connection:
        script = ScriptDirectory.from_config(config(connection))
    assert script.get_heads() == [HEAD]
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == KNOWN


def test_models_and_chain_agree(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.connect() as connection:
        command.check(config(connection))
    database.close()


def test_every_foreign_key_has_an_index(database_url: str) -> None:
    database = Database(database_url)
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


@pytest.mark.parametrize("revision", KNOWN[:-1])
def test_an_older_database_waits_for_an_upgrade_that_keeps_its_data(database_url: str, revision: str) -> None:
    engine = made_by(database_url, revision)
    with_data(engine)
    with pytest.raises(UpgradeNeeded, match="older") as caught:
        Database(database_url)
    assert "ucp catalog upgrade" in str(caught.value.hint)

    catalog = Catalog(database_url, upgrade=True)

    entry = catalog.get("abab")
    assert (entry.run, entry.step, entry.state, entry.tags, entry.topology) == (
        "run7",
        5,
        "deleted",
        ("good",),
        {"zero": 3},
    )
    assert entry.purge_after is None
    catalog.untag("abab", "good", reason="upgraded")
    assert catalog.get("abab").tags == ()
    assert catalog.lineage(entry.id).edges
    assert catalog.record(manifest(1), "/data/1").name == "run7@0"
    with catalog.database.engine.connect() as connection:
        command.check(config(connection))
    catalog.close()
    Database(database_url).close()  # and nothing more to do
    engine.dispose()


@pytest.mark.parametrize("revision", KNOWN[1:])
def test_a_revision_can_be_taken_back_with_data(database_url: str, revision: str) -> None:
    engine = made_by(database_url, KNOWN[0])
    with_data(engine)
    with engine.begin() as connection:
        command.upgrade(config(connection), revision)
    with engine.begin() as connection:
        command.downgrade(config(connection), KNOWN[KNOWN.index(revision) - 1])
    with engine.begin() as connection:
        assert connection.execute(sa.text("select name from tag")).scalar_one() == "good"
        with pytest.raises(NotImplementedError, match="first revision"):
            command.downgrade(config(connection), "base")
    engine.dispose()


def test_a_newer_database_is_only_read(database_url: str) -> None:
    with Catalog(database_url) as catalog:
        catalog.record(manifest(1), "/data/1")
        with catalog.database.writing() as connection:
            connection.execute(sa.text(f"update {VERSION_TABLE} set version_num = 'future'"))  # noqa: S608

    with Catalog(database_url) as catalog:
        assert catalog.count() == 1
        with pytest.raises(UpgradeNeeded, match="newer ucformat") as caught:
            catalog.tag("run7@0", "x")
        assert "pip install --upgrade" in str(caught.value.hint)


def test_tables_of_somebody_else_are_left_alone(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("create table run (name text)"))
    with pytest.raises(PermissionDenied, match="'run' that is not ucformat's"):
        Database(database_url)
    assert sa.inspect(engine).get_table_names() == ["run"]
    engine.dispose()


def test_one_that_is_killed_while_upgrading_leaves_the_database_as_it_was(database_url: str) -> None:
    engine = made_by(database_url, KNOWN[0])
    with_data(engine)
    engine.dispose()
    process = multiprocessing.get_context("spawn").Process(target=_upgrade_and_die, args=(database_url,))
    process.start()
    process.join()
    assert process.exitcode == 9
    with pytest.raises(UpgradeNeeded):
        Database(database_url)
    with Catalog(database_url, upgrade=True) as catalog:
        assert catalog.get("abab").tags == ("good",)


def _upgrade_and_die(url: str) -> None:
    import os

    from ucformat.catalog import database as module

    real = module._migrate

    def migrate_and_die(connection: Connection) -> None:
        real(connection)
        os._exit(9)

    module._migrate = migrate_and_die  # type: ignore[assignment]
    Database(url, upgrade=True)


def test_many_that_come_to_an_empty_database_make_it_once(database_url: str) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(6) as pool:
        ids = pool.map(_identity, [database_url] * 12)
    assert len(set(ids)) == 1


def _identity(url: str) -> str:
    database = Database(url)
    with database.reading() as connection:
        found = connection.execute(sa.text("select id from catalog")).scalars().all()
    database.close()
    assert len(found) == 1
    return str(found[0])


def test_two_that_upgrade_at_once_both_end_well(database_url: str) -> None:
    engine = made_by(database_url, KNOWN[0])
    with_data(engine)
    engine.dispose()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_upgrade, [database_url] * 8) == [HEAD] * 8


def _upgrade(url: str) -> str:
    database = Database(url, upgrade=True)
    found = database.revision
    database.close()
    return found


def test_a_catalog_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no catalog"):
        Database(f"sqlite:///{tmp_path}/new/catalog.db", read_only=True)
