"""Where the two engines would differ if they were left to themselves."""

from __future__ import annotations

from datetime import timedelta
from operator import ne
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, delete, insert, select, update

from tests.catalog.filter.reference import OPERATORS
from tests.catalog.filter.world import NOW, WORLDS, store
from ucformat.catalog.filter.compile import compile_filter, compile_sort, read_filter, read_sort
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.models import CheckpointRow, Config, Metric, Tag
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Connection


@pytest.fixture
def connection(empty_database_url: str) -> Iterator[Connection]:
    """One checkpoint in a database."""
    engine = create_engine(empty_database_url)
    store(engine, WORLDS[1][:1])
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def is_so(connection: Connection, text: str) -> bool:
    return bool(
        connection.scalar(select(compile_filter(parse(text), now=NOW)).select_from(CheckpointRow))
    )


#: The value of config.x -> filters that are true of it, and that are false.
DOCUMENTS: list[tuple[Any, list[str], list[str]]] = [
    (1, ["= 1", "= 1.0", "in (2, 1)", "< 1.5", "is not null"], ["= true", "= '1'", "!= 1", "like '1'", "is null"]),
    (1.0, ["= 1", "= 1.0", "= 1e0"], ["= true", "= '1.0'"]),
    (True, ["= true", "!= false", "!= 1", "in (1, true)"], ["= 1", "= 'true'", "= false", "in (1, 'true')"]),
    ("1", ["= '1'", "!= 1", "like '_'"], ["= 1", "< 2", "> 0", "= true"]),
    ("True", ["= 'True'", "like 'T%'"], ["= true", "= 'true'", "like 't%'"]),
    (None, ["is null", "!= 1", "not like '%'"], ["= 1", "is not null", "in (0, 'null', false)", "= 'null'"]),
    ([], ["is not null", "!= 1"], ["= 1", "= '[]'", "like '%'", "is null"]),
    ({}, ["is not null"], ["= '{}'", "like '%'", "< 1", "= false"]),
    (0.0001, ["= 1e-4", "= 0.0001", "= .1e-3", "in (1, 1e-4)"], ["= 1.0000000000000002e-4", "< 1e-4", "> 0.0001"]),
    (0.1 + 0.2, ["= 0.30000000000000004", "> 0.3"], ["= 0.3", "= 0.30000000000000005e0 and config.x < 0.3"]),
    (2**53 + 1, ["= 9007199254740993", "> 9007199254740992.0"], ["= 9007199254740992", "= 9007199254740992.0"]),
    (2**62, ["= 4611686018427387904", "= 4.611686018427388e18"], ["= 4611686018427387905"]),
    (float(2**62), ["= 4.611686018427388e18", "<= 4.611686018427388e18"], ["< 4.611686018427388e18"]),
    (2**63 - 1, ["= 9223372036854775807", "< 9223372036854775808"], ["= 9223372036854775806", "= 9.3e18"]),
    (2**64 - 1, ["= 18446744073709551615", "> 1.8e19"], ["< 18446744073709551615", "= 1.8e19"]),
    (10**400, ["> 1e308", "is not null"], ["= 1e308", "< 0"]),
    ("", ["= ''", "is not null", "like '%'"], ["> ''", "like '_%'"]),
    ("Ärger", ["> 'Z'", "> 'ar'", "like 'Ä%'", "< 'ä'"], ["like 'ä%'", "< 'B'"]),
    ("a\nb", ["like 'a%b'", "like 'a_b'"], ["like 'ab'"]),
    ("50%", ["like '50\\%'", "like '5_%'"], ["like '50\\_'", "like '50%\\%%\\%'"]),
    ("a*[b]?", ["like 'a*[b]?'", "like '%*%'", "like '%?'", "like '%[b]%'"], ["like 'a[*]%'", "like 'b'"]),
    ("back\\slash", ["like 'back\\\\slash'", "= 'back\\slash'"], ["like 'back\\slash'"]),
    ("😀", ["like '_'", "> '\uff5e'", "= '😀'"], ["like '__'", "< '\uff5e'"]),
]  # fmt: skip


def test_values_of_documents(connection: Connection) -> None:
    for i, (value, true, false) in enumerate(DOCUMENTS):
        connection.execute(
            insert(Config).values(id=100 + i, hash=f"h{i}", document={"x": value, "é": [value]})
        )
        both = {"x": value, "é": [value]}
        connection.execute(update(CheckpointRow).values(config_id=100 + i, topology=both))
        for key in ("config.x", "topology.x", "config.é.0", "topology.'é'.0"):
            for condition in true:
                assert is_so(connection, f"{key} {condition}".replace("config.x", key)), (
                    value,
                    key,
                    condition,
                )
            for condition in false:
                assert not is_so(connection, f"{key} {condition}".replace("config.x", key)), (
                    value,
                    key,
                    condition,
                )
                assert is_so(connection, f"not ({key} {condition})".replace("config.x", key)), (
                    value,
                    key,
                    condition,
                )


def test_metrics_and_integers_between_two_floats(connection: Connection) -> None:
    connection.execute(insert(Metric).values(checkpoint=1, name="tokens", value=0, measured=NOW))
    for value in (2.0**53, 2.0**53 + 2, 2.0**53 + 4, -(2.0**53) - 4):
        connection.execute(update(Metric).where(Metric.name == "tokens").values(value=value))
        for bound in (*range(2**53 - 1, 2**53 + 6), -(2**53) - 3, -(2**53) - 5, 10**30):
            for operator, compared in {**OPERATORS, "!=": ne}.items():
                text = f"metric.tokens {operator} {bound}"
                assert is_so(connection, text) == compared(value, bound), (value, text)
            assert is_so(connection, f"metric.tokens in (1, {bound})") == (value == bound)


def test_a_list_is_not_an_object_and_an_object_no_list(connection: Connection) -> None:
    document = {"l": ["a", ["b"]], "o": {"0": "a", "01": "b", "-1": "c"}}
    connection.execute(update(CheckpointRow).values(topology=document))
    for text in (
        "topology.l.0 = 'a'",
        "topology.l.1.0 = 'b'",
        "topology.o.0 = 'a'",
        "topology.o.01 = 'b'",
        "topology.o.'-1' = 'c'",
    ):
        assert is_so(connection, text), text
    big = "9" * 20
    for path in (
        "l.01",
        "l.'-1'",
        "l.'+0'",
        "l.' 0'",
        "l.2",
        "l.''",
        f"l.{big}",
        "l.0.0",
        "l.'$'",
        "l.'#-1'",
        "o.2",
    ):
        assert is_so(connection, f"topology.{path} is null"), path


def test_postgresql_compares_and_orders_text_by_code_point() -> None:
    dialect = create_engine("postgresql+psycopg://").dialect
    for text in (
        "tag < 'a'",
        "run >= 'a'",
        "config.x < 'a'",
        "tensor.name > 'a'",
        "id like 'a%'",
        "topology.x like 'a%'",
    ):
        assert 'COLLATE "C"' in str(
            compile_filter(parse(text), now=NOW).compile(dialect=dialect)
        ), text
    for text in ("id", "run", "engine", "config.x", "topology.x"):
        written = [str(order.compile(dialect=dialect)) for order in compile_sort(parse_sort(text))]
        assert 'COLLATE "C"' in " ".join(written), text
        assert all("NULLS LAST" in w for w in written[:-1])


def test_age_is_of_the_instant_that_is_given(connection: Connection) -> None:
    created = WORLDS[1][0].scalars["created"]
    week = parse("age < 7d")
    for days, young in ((6.99, True), (7, False), (8, False), (-1, True)):
        now = created + timedelta(days=days)
        query = select(compile_filter(week, now=now)).select_from(CheckpointRow)
        assert connection.scalar(query) == young, days
    assert is_so(connection, "age < 999999999d")
    assert is_so(connection, "age > -999999999d")


def test_times_have_zones(connection: Connection) -> None:
    connection.execute(update(CheckpointRow).values(created=NOW))  # 12:00 UTC
    for text in (
        "created = '2026-11-08T12:00'", "created = '2026-11-08 12:00:00Z'", "created = '2026-11-08T14:00:00+02:00'",
        "created > '2026-11-08'", "created < '2026-11-09'", "created in ('2026-11-08T11:00-01:00')",
    ):  # fmt: skip
        assert is_so(connection, text), text
    assert not is_so(connection, "created > '2026-11-08T12:00'")
    assert is_so(connection, "created > '2026-11-08T11:59:59.999999'")


def test_unknown_names_are_errors_where_there_are_others(connection: Connection) -> None:
    connection.execute(delete(Metric))
    text = "metric.los < 1 and config.optimizer.l = 1"
    connection.execute(update(CheckpointRow).values(config_id=None))
    connection.execute(delete(Config))
    read_filter(connection, text)  # nothing is known
    connection.execute(insert(Metric).values(checkpoint=1, name="loss", value=1, measured=NOW))
    with pytest.raises(UsageError) as caught:
        read_filter(connection, text)
    assert str(caught.value).splitlines()[1:] == [
        "  " + text,
        "  ^^^^^^^^^^",
        "  hint: did you mean metric.loss?",
    ]
    connection.execute(
        insert(Config).values(id=5, hash="x", document={"optimizer": {"lr": 1, "eps": None}})
    )
    text = "metric.loss < 1 and config.optimizer.l = 1"
    with pytest.raises(UsageError) as caught:
        read_filter(connection, text)
    assert "config.optimizer.lr" in str(caught.value.hint)
    for known in (
        "config.optimizer.lr = 1",
        "config.optimizer.eps is null",
        "config.optimizer is null",
        "topology.x = 1",
    ):
        read_filter(connection, known)
    with pytest.raises(UsageError, match=r"metric\.x"):
        read_sort(connection, "-metric.x")
    with pytest.raises(UsageError) as caught:
        read_filter(connection, "loss < 1")
    assert caught.value.hint == "did you mean metric.loss?"
    with pytest.raises(UsageError) as caught:
        read_sort(connection, "lr")
    assert caught.value.hint == "did you mean config.optimizer.lr?"


def test_digests_are_searched_by_blocks(tmp_path: Path) -> None:
    """On SQLite; PostgreSQL plans by the size of tables, which are small here."""
    engine = create_engine(f"sqlite:///{tmp_path}/catalog.db")
    store(engine, WORLDS[1][:1])
    with engine.connect() as connection:
        for text in (
            "tensor.digest = 'x'",
            "tensor.digest != 'x'",
            "not tensor.digest in ('x', 'y') or tag = 'a'",
        ):
            query = select(CheckpointRow.serial).where(compile_filter(parse(text), now=NOW))
            written = str(query.compile(connection, compile_kwargs={"literal_binds": True}))
            plan = " ".join(
                row.detail for row in connection.exec_driver_sql(f"explain query plan {written}")
            )
            assert "SEARCH digest USING PRIMARY KEY (block=? AND digest=?)" in plan, plan
    engine.dispose()


def test_statements_are_kept_and_used_again(connection: Connection) -> None:
    """A second filter of the same form is not compiled again, and has its own values."""
    connection.execute(insert(Tag).values(checkpoint=1, name="mine-1", created=NOW, who=""))
    kept = connection.engine._compiled_cache
    assert kept is not None
    text = "tag like 'mine-{0}' and (config.x = {0} or topology.'é' < 'a{0}' or metric.m = {0} or tag = 'mine-{0}')"
    assert is_so(connection, text.format(1))
    before = len(kept)
    assert not is_so(connection, text.format(2))
    assert len(kept) == before
