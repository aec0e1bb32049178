"""SQL of users: every query runs, and nothing writes, whatever they try."""

from __future__ import annotations

import _thread
import gc
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from tests.catalog.manifests import manifest
from tests.patience import wait_until
from ucformat.catalog import sql
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.database import Database
from ucformat.catalog.models import Base, RunRow
from ucformat.catalog.recording import Found, record_all
from ucformat.catalog.sql import QueryResult, run_sql
from ucformat.catalog.stamp import Stamp
from ucformat.cli.main import ucp
from ucformat.errors import PermissionDenied, UcformatError, UnsafeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.catalog.databases import Postgres

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.matrix)]
)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """One for all: if a statement writes, the next test sees it too."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('sql')}/catalog.db"
    else:
        url = request.getfixturevalue("postgres_server").fresh()
    database = Database(url)
    with database.writing() as c:
        for i in (1, 2, 3):
            m = manifest(i, step=i, config={"lr": 0.1}, metrics={"loss": 0.5})
            record_all(c, [Found(m, f"/r/{i}", run="run7")], Stamp("me", NOW))
    yield database
    database.close()


def contents(database: Database) -> dict[str, list[Any]]:
    """All rows of all tables."""
    with database.reading() as c:
        return {
            t: sorted(map(repr, c.execute(sa.select(table))))
            for t, table in Base.metadata.tables.items()
        }


def test_rows_and_columns(database: Database) -> None:
    found = run_sql(database, "select step, id as who from checkpoint order by step", None)
    assert found == QueryResult(
        ("step", "who"), tuple((i, manifest(i).id) for i in (1, 2, 3)), truncated=False
    )
    assert run_sql(database, "select 1 as a, 2 as a", None) == QueryResult(
        ("a", "a"), ((1, 2),), truncated=False
    )
    empty = run_sql(database, "select id from checkpoint where step > 100", None)
    assert empty == QueryResult(("id",), (), truncated=False)


@pytest.mark.parametrize(
    ("limit", "rows", "truncated"), [(0, 0, True), (2, 2, True), (3, 3, False), (9, 3, False)]
)
def test_a_limit(database: Database, limit: int, rows: int, truncated: bool) -> None:
    found = run_sql(database, "select step from checkpoint", limit)
    assert (len(found.rows), found.truncated) == (rows, truncated)


def test_a_limit_fetches_no_more(database: Database) -> None:
    series = "with recursive n(i) as (select 1 union all select i + 1 from n) select i from n"
    assert run_sql(database, series, 5) == QueryResult(
        ("i",), ((1,), (2,), (3,), (4,), (5,)), truncated=True
    )


@pytest.mark.parametrize(
    "statement",
    [
        "values (1), (2)",
        "with x as (select 1) select * from x",
        "select 1 union all select 2",
        "select 1;",
        "  \n\tselect 1 -- with a remark; and more\n",
        "/* first */ select 1;",
        "select '; delete from checkpoint'",
        "select '%s %(a)s % ? :x {} $1'",
        "select run.name, count(*), sum(nbytes) from checkpoint join run on run.id = run_id group by run.name",
        "select 'größe 模型 \U0001f600'",
    ],
)
def test_queries_of_all_forms(database: Database, statement: str) -> None:
    assert run_sql(database, statement, None).rows


def test_texts_come_back_as_they_were_written(database: Database) -> None:
    text = "%s %(a)s % ? :x {} $1 größe 模型 \U0001f600\n\r\t\x01"
    assert run_sql(database, f"select '{text}'", None).rows == ((text,),)


@pytest.mark.parametrize(
    "statement",
    [
        "insert into run (name, created) values ('x', '2026-01-01')",
        "insert into run (name, created) values ('x', '2026-01-01') returning id",
        "delete from checkpoint",
        "update checkpoint set step = 0",
        "drop table tag",
        "create table mine (a int)",
        "create temporary table mine (a int)",
        "create view mine as select 1 as a",
        "alter table tag rename to gat",
        "create index mine on run (created)",
        "begin",
        "commit",
        "rollback",
        "savepoint x",
        "analyze",
        "reindex table run",
        "vacuum",
        "DELETE FROM checkpoint;",
        "/* a query */ delete from checkpoint",
    ],
)
def test_whatever_writes_is_refused(database: Database, statement: str) -> None:
    before = contents(database)
    if statement.startswith("reindex") and database.sqlite:
        statement = "reindex run"
    with pytest.raises(PermissionDenied, match="only a single read-only query") as caught:
        run_sql(database, statement, None)
    assert caught.value.hint
    assert contents(database) == before


@pytest.mark.parametrize(
    "statement",
    [
        "commit; delete from checkpoint",
        "rollback; delete from checkpoint",
        "begin; delete from checkpoint; commit",
        "select 1; delete from checkpoint",
        "select 1; select 2",
        "select 1; commit; delete from checkpoint",
        "set transaction read write; delete from checkpoint",
        "delete from checkpoint; select 1",
        "select 1\n;\ndelete from checkpoint",
        "select 1 /* ; */ ; delete from checkpoint -- ",
    ],
)
def test_several_statements_are_none(database: Database, statement: str) -> None:
    before = contents(database)
    with pytest.raises((UsageError, PermissionDenied)):
        run_sql(database, statement, None)
    assert contents(database) == before


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("selec 1", "selec"),
        ("select * from nowhere", "nowhere"),
        ("select nothing from checkpoint", "nothing"),
        ("delete from nowhere", "nowhere"),
        ("select * from checkpoint where", "incomplete|end of input"),
        ("select ?", "bindings|end of input"),
        ("select $1", "bindings|parameters"),
        ("", "is empty"),
        (" \n\t", "is empty"),
        ("select 1\0; delete from checkpoint", "NUL"),
        ("select '\ud800'", "surrogates"),
    ],
)
def test_what_the_engine_cannot_make_sense_of(
    database: Database, statement: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        run_sql(database, statement, None)


@pytest.mark.parametrize("statement", ["-- nothing", ";", "/* nothing */"])
def test_nothing_but_remarks(database: Database, statement: str) -> None:
    with pytest.raises(PermissionDenied):
        run_sql(database, statement, None)


def test_what_takes_too_long_is_ended(database: Database) -> None:
    endless = "with recursive n(i) as (select 1 union all select 1 from n) select count(*) from n"
    with pytest.raises(UcformatError, match=r"cancelled after 0.2 s") as caught:
        run_sql(database, endless, None, timeout=0.2)
    assert not isinstance(caught.value, UsageError | PermissionDenied)
    assert run_sql(database, "select count(*) from checkpoint", None).rows == ((3,),)


def test_rows_without_end_are_ended(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "with recursive n(i) as (select 1 union all select 1 from n) select i from n"
    with pytest.raises(UcformatError, match=r"cancelled after 0.2 s"):
        run_sql(database, endless, None, timeout=0.2)
    monkeypatch.setattr(sql, "_MAX_RESULT", 1 << 20)
    with pytest.raises(UcformatError, match="more than 1 MiB, at row"):
        run_sql(database, endless, None)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_that_is_none(database: Database, timeout: float) -> None:
    with pytest.raises(UsageError, match="time limit cannot be"):
        run_sql(database, "select 1", None, timeout=timeout)


def test_a_limit_below_zero(database: Database) -> None:
    with pytest.raises(UsageError, match="cannot be -1"):
        run_sql(database, "select 1", -1)


def test_what_was_written_before_is_seen(database_url: str) -> None:
    database = Database(database_url)
    for i in (10, 20):
        with database.writing() as c:
            c.execute(sa.insert(RunRow).values(name=f"run{i}", created=NOW))
        assert (f"run{i}",) in run_sql(database, "select name from run", None).rows
    with pytest.raises(PermissionDenied):
        run_sql(database, "delete from run", None)
    with database.writing() as c:
        c.execute(sa.insert(RunRow).values(name="later", created=NOW))
    assert run_sql(database, "select count(*) from run", None).rows == ((3,),)
    database.close()


def test_a_catalog_that_was_opened_to_be_read(database: Database) -> None:
    reader = Database(database.engine.url.render_as_string(hide_password=False), read_only=True)
    assert run_sql(reader, "select count(*) from checkpoint", None).rows == ((3,),)
    with pytest.raises(PermissionDenied):
        run_sql(reader, "delete from checkpoint", None)
    reader.close()


def test_any_value_is_a_plain_one(database: Database) -> None:
    ((step, created, config, value, nothing),) = run_sql(
        database,
        "select step, created, document, value, null from checkpoint join config on config.id = config_id"
        " join metric on metric.checkpoint = serial where step = 1",
        None,
    ).rows
    assert (step, value, nothing) == (1, 0.5, None)
    assert datetime.fromisoformat(created).replace(tzinfo=UTC) == manifest(1).created
    assert config == ('{"lr": 0.1}' if database.sqlite else {"lr": 0.1})


# SQLite


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[Database]:
    folder = tmp_path / "a #folder? with 100%41 odd & names ü"
    folder.mkdir()
    database = Database(str(folder / "cata log#1.db"))
    yield database
    database.close()


@pytest.mark.parametrize(
    "statement",
    [
        "attach '{other}' as other",
        "attach database 'file:{other}?mode=rwc' as other",
        "detach main",
        "vacuum into '{other}'",
        "pragma query_only = off",
        "pragma query_only",
        "pragma writable_schema = on",
        "pragma journal_mode = delete",
        "pragma wal_checkpoint(truncate)",
        "pragma user_version = 7",
        "select * from pragma_wal_checkpoint",
        "select load_extension('{other}')",
        "release x",
        "end",
        "explain delete from run",
        "update sqlite_master set name = 'x'",
        "update sqlite_temp_master set name = 'x'",
        "insert into sqlite_master values (1, 2, 3, 4, 5)",
        "delete from sqlite_master",
        "create virtual table mine using fts5(a)",
        "create temporary table mine as select 1",
        "create temporary trigger t after insert on run begin delete from tag; end",
    ],
)
def test_sqlite_lets_nothing_else_through(lite: Database, tmp_path: Path, statement: str) -> None:
    other = tmp_path / "other.db"
    sqlite3.connect(tmp_path / "bait.db").close()
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises((PermissionDenied, UsageError)):
        run_sql(lite, statement.format(other=other), None)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == before


def test_sqlite_refuses_even_without_the_authorizer(
    lite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_allowed", lambda *_: True)
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda url, **more: opened.append(url) or connect(url, **more),  # type: ignore[func-returns-value]
    )
    with pytest.raises(PermissionDenied, match="readonly"):
        run_sql(lite, "delete from run", None)
    assert [url.partition("?")[2] for url in opened] == ["mode=ro"]


def test_sqlite_tells_of_its_tables(lite: Database) -> None:
    assert ("name",) in run_sql(lite, "select name from pragma_table_info('run')", None).rows
    assert "pk" in run_sql(lite, "PRAGMA table_info(run)", None).columns
    assert run_sql(lite, "explain query plan select * from run", None).rows
    assert run_sql(lite, "select value from json_each('[1, 2]')", None).rows == ((1,), (2,))


def test_sqlite_gives_what_it_stores(lite: Database) -> None:
    found = run_sql(
        lite, "select x'00ff', 9223372036854775807, 1.5, cast(x'41ff' as text), '', 1e999", None
    ).rows
    assert found == ((b"\x00\xff", 2**63 - 1, 1.5, "A\ufffd", "", float("inf")),)


def test_sqlite_reads_a_catalog_that_nobody_has_open(lite: Database) -> None:
    lite.close()
    assert run_sql(lite, "select count(*) from run", None).rows == ((0,),)


def test_sqlite_says_when_the_file_is_broken(lite: Database) -> None:
    file = Path(str(lite.engine.url.database))
    lite.close()
    file.write_bytes(b"this is no database" * 1000)
    with pytest.raises(UcformatError, match="not a database") as caught:
        run_sql(lite, "select 1 from run", None)
    assert not isinstance(caught.value, UsageError | PermissionDenied)


@pytest.mark.parametrize(
    "statement",
    [
        "select length(randomblob(1 << 30))",
        "select length(zeroblob(1 << 30))",
        "select length(replace(hex(zeroblob(1 << 20)), '0', hex(zeroblob(100))))",
        "with recursive n(s) as (select 'x' union all select s || s from n) select max(length(s)) from n",
    ],
)
def test_sqlite_makes_no_value_that_is_very_large(lite: Database, statement: str) -> None:
    with pytest.raises(UsageError, match="too big"):
        run_sql(lite, statement, None)


def test_sqlite_takes_no_more_memory_than_it_may(lite: Database) -> None:
    program = (
        "import sys; from ucformat.catalog.database import Database; from ucformat.catalog.sql import run_sql\n"
        "run_sql(Database(sys.argv[1]), sys.argv[2], None, timeout=None, memory=32 << 20)"
    )
    endless = "with recursive n(i) as (select 1 union select i + 1 from n) select count(*) from n"
    command = [sys.executable, "-c", program, str(lite.engine.url.database), endless]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert "needs more memory than its limit" in done.stderr


def test_sqlite_can_be_interrupted(lite: Database) -> None:
    endless = (
        "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    )
    timer = threading.Timer(0.3, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the timer may be up as soon as it starts
        timer.start()
        run_sql(lite, endless, None)


# PostgreSQL


@pytest.fixture(scope="module")
def server(postgres_server: Postgres) -> Iterator[Database]:
    """That of a superuser, whom nothing stops but what is tested here."""
    url = postgres_server.fresh(superuser=True)
    database = Database(url)
    with database.writing() as c:
        c.execute(sa.insert(RunRow).values(name="keep", created=NOW))
    yield database
    database.close()
    postgres_server.drop(url)


@pytest.mark.parametrize(
    "statement",
    [
        "set transaction read write",
        "set session characteristics as transaction read write",
        "set default_transaction_read_only = off",
        "reset all",
        "select set_config('transaction_read_only', 'off', false)",
        "select nextval('checkpoint_serial_seq')",
        "select setval('checkpoint_serial_seq', 1)",
        "select 1 into mine",
        "with gone as (delete from run returning *) select * from gone",
        "select * from run for update",
        "select lo_create(0)",
        "select query_to_xml('delete from run', true, true, '')",
        "copy run to program 'touch {other}'",
        "copy run to '{other}'",
        "copy run from '{other}'",
        "do $$ begin delete from run; end $$",
        "do $$ begin commit; delete from run; end $$",
        "lock table run in access exclusive mode",
        "listen x",
        "prepare x as delete from run",
        "declare c cursor for select 1",
        "explain analyze delete from run",
        "merge into run using run as r on false when matched then delete",
    ],
)
def test_postgresql_lets_nothing_else_through(
    server: Database, tmp_path: Path, statement: str
) -> None:
    before = contents(server)
    with pytest.raises(PermissionDenied):
        run_sql(server, statement.format(other=tmp_path / "other"), None, trust_role=True)
    assert contents(server) == before
    assert not list(tmp_path.iterdir())


def test_postgresql_keeps_functions_from_writing(server: Database) -> None:
    with server.writing() as c:
        for name, body in (
            ("writes", "delete from catalog;"),
            ("turns", "set transaction read write; delete from catalog;"),
            (
                "configures",
                "perform set_config('transaction_read_only', 'off', true); delete from catalog;",
            ),
        ):
            code = f"create function {name}() returns int language plpgsql as $$ begin {body} return 1; end $$"
            c.exec_driver_sql(code)
    before = contents(server)
    assert before["catalog"]
    for name in ("writes", "turns", "configures"):
        with pytest.raises(PermissionDenied):
            run_sql(server, f"select {name}()", None, trust_role=True)
    assert contents(server) == before


def test_postgresql_forgets_what_a_query_did_to_the_session(server: Database) -> None:
    ((first,),) = run_sql(
        server,
        "select pg_backend_pid() from (select pg_advisory_lock(7)) as locked",
        None,
        trust_role=True,
    ).rows
    run_sql(server, "select set_config('search_path', 'nowhere', false)", None, trust_role=True)
    ((second,),) = run_sql(server, "select pg_backend_pid()", None, trust_role=True).rows
    assert first != second
    locks = "select count(*) from pg_locks where locktype = 'advisory'"
    wait_until(
        lambda: run_sql(server, locks, None, trust_role=True).rows == ((0,),)
    )  # with the process that held it
    assert run_sql(server, "select count(*) from run", None, trust_role=True).rows == ((1,),)


def test_postgresql_values_are_plain_ones(server: Database) -> None:
    statement = (
        "select 1.5::numeric, 10::numeric, 12345678901234567890::numeric, 'NaN'::float8, true, '\\x00ff'::bytea,"
        " array[1, 2], interval '90 minutes', date '2020-01-02', timestamptz '2020-01-02 03:04:05.5+00',"
        " time '01:02:03', '10.0.0.1'::inet, '{\"a\": [1.5, null]}'::jsonb, 'x'::name, row(1, 2), ''::text"
    )
    (row,) = run_sql(server, statement, None, trust_role=True).rows
    assert repr(row[3]) == "nan"
    assert row[:3] + row[4:] == (
        1.5,
        10,
        12345678901234567890,
        True,
        b"\x00\xff",
        [1, 2],
        "1:30:00",
        "2020-01-02",
        "2020-01-02T03:04:05.500000+00:00",
        "01:02:03",
        "10.0.0.1",
        {"a": [1.5, None]},
        "x",
        ["1", "2"],
        "",
    )
    assert [type(v) for v in row[:2]] == [float, int]


def test_postgresql_sleeps(server: Database) -> None:
    assert len(run_sql(server, "select pg_sleep(0.01)", None, trust_role=True).rows) == 1


def test_postgresql_says_when_the_connection_is_lost(server: Database) -> None:
    with pytest.raises(UcformatError, match="connection") as caught:
        run_sql(server, "select pg_terminate_backend(pg_backend_pid())", None, trust_role=True)
    assert not isinstance(caught.value, UsageError | PermissionDenied)
    assert run_sql(server, "select 1", None, trust_role=True).rows == ((1,),)


def test_postgresql_times_that_python_has_not(server: Database) -> None:
    with pytest.raises(UsageError, match="too large"):
        run_sql(server, "select 'infinity'::timestamptz", None, trust_role=True)


@pytest.mark.parametrize(
    "lifting",
    [
        "set_config('statement_timeout', '0', false)",
        "set_config('transaction_timeout', '0', false)",
        "pg_sleep(0)",
    ],
)
def test_postgresql_statements_cannot_lift_the_time_limit(server: Database, lifting: str) -> None:
    """The first row lifts it, the others wait."""
    if (
        "transaction_timeout" in lifting
        and run_sql(
            server,
            "select 1 from pg_settings where name = 'transaction_timeout'",
            None,
            trust_role=True,
        ).rows
        == ()
    ):
        pytest.skip("transaction_timeout needs PostgreSQL 17")
    rows = "from generate_series(1, 9) i"
    statement = f"select case i when 1 then {lifting}::text else pg_sleep(3600)::text end {rows}"
    with pytest.raises(UcformatError, match=r"cancelled after 0.5 s"):
        run_sql(server, statement, None, timeout=0.5, trust_role=True)


@pytest.mark.filterwarnings(
    "ignore:.*ServerCursor:ResourceWarning"
)  # SQLAlchemy closes none whose connection is gone
def test_postgresql_is_hung_up_on_if_it_does_not_end(
    server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.writing() as c:
        c.exec_driver_sql(
            "create function deaf() returns int language plpgsql as $$ begin loop begin perform pg_sleep(3600);"
            " exception when query_canceled then null; end; end loop; end $$"
        )
    monkeypatch.setattr(sql, "_GRACE", 0.5)
    with pytest.raises(UcformatError, match=r"cancelled after 0.2 s"):
        run_sql(server, "select deaf()", None, timeout=0.2, trust_role=True)
    gc.collect()
    with (
        server.writing() as c
    ):  # nobody listens to it any more, and it would go on for as long as the server
        c.exec_driver_sql(
            "select pg_terminate_backend(pid) from pg_stat_activity where position('deaf()' in query) > 0"
            " and pid <> pg_backend_pid()"
        )


def test_the_catalog_of_a_superuser_is_described(postgres_server: Postgres) -> None:
    url = postgres_server.fresh(superuser=True)
    with Catalog(url) as catalog:
        catalog.find()
    told = CliRunner().invoke(ucp, ["catalog", "info", "--catalog", url])
    assert told.exit_code == 0, told.output
    assert "may do more than read tables: it is a superuser" in " ".join(told.output.split())
    assert "--trust-role" in told.output


def test_a_superuser_is_not_let_near(server: Database) -> None:
    with pytest.raises(UnsafeError, match="more than read tables: it is a superuser") as caught:
        run_sql(server, "select 1", None)
    assert "--trust-role" in str(caught.value.hint)


@pytest.mark.parametrize(
    "statement",
    [
        "select pg_read_file('postgresql.conf')",
        "select pg_read_binary_file('postgresql.conf')",
        "select pg_ls_dir('.')",
        "select pg_stat_file('postgresql.conf')",
        "select lo_import('postgresql.conf')",
        "select lo_export(1, '{other}')",
        "select pg_create_physical_replication_slot('mine')",
        "select pg_create_logical_replication_slot('mine', 'pgoutput')",
        "select pg_reload_conf()",
        "select pg_rotate_logfile()",
        "select pg_switch_wal()",
        "select pg_create_restore_point('mine')",
        "select pg_terminate_backend(pid) from pg_stat_activity where usename <> session_user and pid is not null",
        "select set_config('role', '{superuser}', false)",
        "select set_config('session_authorization', '{superuser}', false)",
        "select query_to_xml('select pg_read_file(''postgresql.conf'')', true, true, '')",
    ],
)
def test_an_ordinary_role_reaches_nothing_but_tables(
    postgres_server: Postgres, ordinary: Database, tmp_path: Path, statement: str
) -> None:
    """All of these a superuser may do in a transaction that is read only."""
    other, superuser = tmp_path / "other", postgres_server.url.username
    with pytest.raises(
        (PermissionDenied, UsageError), match=r"permission denied|only|privilege|role|terminate"
    ):
        run_sql(ordinary, statement.format(other=other, superuser=superuser), None)
    assert not other.exists()
    assert run_sql(ordinary, "select count(*) from pg_replication_slots", None).rows == ((0,),)


@pytest.fixture(scope="module")
def ordinary(postgres_server: Postgres) -> Iterator[Database]:
    database = Database(postgres_server.fresh())
    yield database
    database.close()


@pytest.mark.parametrize(
    ("right", "said"),
    [
        ("pg_read_server_files", "a member of pg_read_server_files"),
        ("pg_write_server_files", "a member of pg_write_server_files"),
        ("pg_execute_server_program", "a member of pg_execute_server_program"),
        ("pg_signal_backend", "a member of pg_signal_backend"),
        ("superuser", "may become one"),
        ("replication", "may start replication as"),
        ("execute on function pg_read_file(text)", "may call pg_read_file"),
        ("pg_monitor", None),
        ("pg_read_all_data", None),
    ],
)
def test_a_role_that_may_do_more_is_refused(
    postgres_server: Postgres, right: str, said: str | None
) -> None:
    url = postgres_server.fresh()
    inner = f"{right}_of_tests"
    if right in (
        "superuser",
        "replication",
    ):  # not inherited, but the role can be set, in the statement itself
        postgres_server._run(f"create role {inner} {right}")
        postgres_server.grant(inner, url)
    elif right.startswith("execute"):
        admin = sa.create_engine(
            postgres_server.url.set(database=sa.make_url(url).database), poolclass=sa.NullPool
        )
        with admin.begin() as c:
            c.exec_driver_sql(f"grant {right} to {sa.make_url(url).username}")
    else:
        postgres_server.grant(right, url)
    database = Database(url)
    try:
        if said is None:
            assert run_sql(database, "select 1", None).rows == ((1,),)
            return
        with pytest.raises(UnsafeError, match=said):
            run_sql(database, "select 1", None)
        assert run_sql(database, "select 1", None, trust_role=True).rows == ((1,),)
    finally:
        database.close()
        postgres_server.drop(url)
        postgres_server._run(f"drop role if exists {inner}") if right in (
            "superuser",
            "replication",
        ) else None
