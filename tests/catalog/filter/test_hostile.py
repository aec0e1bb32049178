"""Filters that were made to do harm do none: values and names are parameters, and what is too much is refused."""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from sqlalchemy import create_engine, delete, func, insert, select, update

from tests.catalog.filter.strategies import filters, sorts
from tests.catalog.filter.world import NOW, WORLDS, store
from ucformat.catalog.filter.compile import compile_filter, compile_sort
from ucformat.catalog.filter.parse import parse
from ucformat.catalog.filter.syntax import (
    MAX_LENGTH,
    And,
    Compare,
    In,
    IsNull,
    KeyPath,
    Like,
    Node,
    Not,
    Number,
    Or,
    Sort,
    SortKey,
    Text,
    unparse,
)
from ucformat.catalog.models import CheckpointRow, Config, Metric, Tag
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

NASTY = [
    "'", "''", '"', '""', "';drop table tag;--", '";drop table tag;--', "\\", "\\'", "\\\\", "a'||'b", "' or '1'='1",
    "%", "%%", "%s", "%(x)s", ":x", "?", "$1", "$", "{}", "{a}", "[]", "[0]", "a.b", 'a"b.c', "$.a", "#-1", "\n",
    "\r\n", "\t", "\x01", "\x7f", "\u200b", "\u202e", "\ufeff", "é", "e\u0301", "日本", "😀", "\U0010ffff", "x" * 500,
    "/*", "*/", "--", "null", "true", "\\u0000", "\\x00",
]  # fmt: skip


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    """A database of few checkpoints, of which the second bears every nasty word."""
    engine = create_engine(empty_database_url)
    store(engine, WORLDS[1][:3])
    with engine.begin() as c:
        c.execute(
            insert(Config).values(
                id=99, hash="nasty", document={word: {word: word} for word in NASTY}
            )
        )
        topology = {"l": [{word: i} for i, word in enumerate(NASTY)]}
        changed = c.execute(
            update(CheckpointRow)
            .where(CheckpointRow.serial == 2)
            .values(config_id=99, topology=topology)
        )
        assert changed.rowcount == 1
        here: dict[str, Any] = {"checkpoint": 2}
        mine = set(c.scalars(select(Tag.name).where(Tag.checkpoint == 2)))
        tags = [
            {"name": word, "created": NOW, "who": "", **here} for word in NASTY if word not in mine
        ]
        c.execute(insert(Tag), tags)
        c.execute(delete(Metric))
        c.execute(
            insert(Metric),
            [{"name": word, "value": i, "measured": NOW, **here} for i, word in enumerate(NASTY)],
        )
    yield engine
    engine.dispose()


def test_nasty_words_are_found_where_they_are(engine: Engine) -> None:
    with engine.connect() as connection:

        def found(node: Node) -> list[int]:
            condition = compile_filter(parse(unparse(node)), now=NOW)
            return list(
                connection.scalars(
                    select(CheckpointRow.serial).where(condition).order_by(CheckpointRow.serial)
                )
            )

        tags = {row.serial: set(row.tag) for row in WORLDS[1][:3]}
        tags[2] |= set(NASTY)
        for i, word in enumerate(NASTY):
            escaped = "".join("\\" + c if c in "\\%_" else c for c in word)
            bearers = [serial for serial, words in tags.items() if word in words]
            assert found(Compare(KeyPath(("tag",)), "=", Text(word))) == bearers, word
            assert found(In(KeyPath(("tag",)), (Text(word), Text("nobody's")))) == bearers, word
            assert found(Like(KeyPath(("tag",)), Text(escaped))) == bearers, word
            assert found(Compare(KeyPath(("metric", word)), "=", Number(i))) == [2], word
            assert found(Compare(KeyPath(("config", word, word)), "=", Text(word))) == [2], word
            assert found(IsNull(KeyPath(("config", word, word + "x")), negated=True)) == [], word
            assert found(Compare(KeyPath(("topology", "l", str(i), word)), "=", Number(i))) == [
                2
            ], word
            for root in ("config", "topology"):
                sort = Sort((SortKey(KeyPath((root, word, word))),))
                assert (
                    len(
                        list(
                            connection.scalars(
                                select(CheckpointRow.serial).order_by(*compile_sort(sort))
                            )
                        )
                    )
                    == 3
                )
        assert connection.scalar(select(func.count()).select_from(Tag)) == sum(
            map(len, tags.values())
        )


UNHOLDABLE = [
    "tag = '\0'",
    "config.'\0' = 1",
    "tag = '\ud800'",
    'metric."\udfff" is null',
    "\0",
    "step = 1\0",
]


@pytest.mark.parametrize("text", UNHOLDABLE)
def test_what_no_database_can_hold_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot contain this character"):
        parse(text)


DIALECTS = [create_engine(url).dialect for url in ("sqlite://", "postgresql+psycopg://")]


@given(filters, sorts)
def test_statements_have_only_parameters(node: Node, sort: Sort) -> None:
    """The text of a statement does not change with the values and names in it, as far as they are marked."""

    def marked(value: Any) -> Any:
        match value:
            case Text(text):
                return Text(f"MARK{text}" if text[:1].isalpha() else text)
            case KeyPath((root, *path)) if root in {"config", "topology", "producer", "metric"}:
                return KeyPath((root, *(f"MARK{p}" for p in path)))
            case And(nodes) | Or(nodes):
                return type(value)(tuple(map(marked, nodes)))
            case Not(inner):
                return Not(marked(inner))
            case Compare(key, operator, literal):
                return Compare(
                    marked(key), operator, literal if key.parts[0] in TIMES else marked(literal)
                )
            case In(key, values, negated):
                return In(
                    marked(key),
                    tuple(v if key.parts[0] in TIMES else marked(v) for v in values),
                    negated,
                )
            case Like(key, pattern, negated):
                return Like(marked(key), Text(f"MARK{pattern.value}"), negated)
            case IsNull(key, negated):
                return IsNull(marked(key), negated)
            case _:
                return value

    query = (
        select(CheckpointRow.serial)
        .where(compile_filter(marked(node), now=NOW))
        .order_by(*compile_sort(sort))
    )
    for dialect in DIALECTS:
        text = str(query.compile(dialect=dialect))
        assert "MARK" not in text
        assert all(c.isascii() for c in text)


TIMES = {"created", "recorded", "deleted"}


HUGE: dict[str, Callable[[], str]] = {
    "too long": lambda: "step = 1 or " * 900,
    "open": lambda: "(" * 9_000,
    "open and shut": lambda: "(" * 4_900 + "step = 1" + ")" * 4_900,
    "not": lambda: "not " * 2_000 + "step = 1",
    "nested": lambda: "not (step = 1 and " * 400 + "step = 1" + ")" * 400,
    "many": lambda: " or ".join(["step=1"] * 990),
    "dots": lambda: "config" + ".a" * 4_900 + " = 1",
    "digits": lambda: "step = " + "9" * 9_000,
    "small digits": lambda: "step = 0." + "9" * 9_000,
    "age": lambda: "age < " + "9" * 9_000 + "d",
    "size": lambda: "size < " + "9" * 9_000 + "TB",
    "quotes": lambda: "tag = " + "'" * 9_001,
    "list": lambda: "step in (" + "1," * 4_900 + "1)",
    "open list": lambda: "step in (" + "1," * 4_900,
    "blanks": lambda: " " * 9_990,
    "key": lambda: "'" + "a" * 9_900 + "' = 1",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_filters_are_read_or_refused_at_once(name: str) -> None:
    text = HUGE[name]()
    if name in {"open and shut", "list", "small digits"}:
        compile_filter(parse(text), now=NOW)
        return
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert len(str(caught.value)) < 1_500


@pytest.mark.parametrize("character", "9.'\"(-+aeE_ =<%\\é")
def test_no_text_takes_long_to_read(character: str) -> None:
    start = time.process_time()
    for text in (
        character * 9_900,
        f"step = {character * 9_900}",
        f"step = 1{character * 9_900}d",
        f"a.{character * 9_900}",
    ):
        with contextlib.suppress(UsageError):
            parse(text)
    # they take 10 ms, and collecting the garbage of other tests some seconds; what goes back over a
    # text again and again takes minutes
    assert time.process_time() - start < 20


def chain(depth: int, atom: Node, *, last: bool) -> Node:
    """Nested as deep as is allowed, `and` and `or` in turn."""
    node = atom
    for level in range(depth):
        pair = (atom, node) if last else (node, atom)
        node = And(pair) if level % 2 else Or(pair)
    return node


def bushy(depth: int, atom: Node) -> Node:
    """Deep in two places at every level."""
    node = atom
    for level in range(1, depth):
        pair = (chain(max(0, level - 6), atom, last=True), node)
        node = And(pair) if level % 2 else Or(pair)
    return node


ATOMS = [
    Compare(KeyPath(("config", *["a"] * 31)), "=", Number(1)),
    Compare(KeyPath(("config", *["a'"] * 31)), "!=", Text("x")),
    Compare(KeyPath(("verified",)), "=", parse("verified = true").value),  # type: ignore[union-attr]
    Compare(KeyPath(("tensor", "digest")), "=", Text("x")),
    Not(Compare(KeyPath(("step",)), ">", Number(1))),
]


def deep(frames: int, run: Callable[[], object]) -> None:
    """Call it when already so many frames are on the stack, as in the worker of a web server."""
    if frames:
        deep(frames - 1, run)
    else:
        run()


@pytest.mark.parametrize("atom", ATOMS, ids=str)
def test_what_is_allowed_can_be_run(engine: Engine, atom: Node) -> None:
    room = sys.getrecursionlimit() - 1_000  # what measures coverage may have raised it
    nested = 31 - isinstance(atom, Not)
    tried = 0
    for node in (
        chain(nested, atom, last=True),
        chain(nested, atom, last=False),
        Not(chain(nested - 1, atom, last=True)),
        bushy(nested - 1, atom),
        Or((atom,) * (500 if isinstance(atom, Not) else 60)),
    ):
        if len(unparse(node)) <= MAX_LENGTH:
            tried += 1
            inner = (
                select(CheckpointRow.serial)
                .where(compile_filter(parse(unparse(node)), now=NOW))
                .limit(5)
            )
            query = select(func.count()).select_from(inner.subquery())
            with engine.connect() as connection:
                deep(300 + room, partial(connection.scalar, query))
    assert tried >= 3


def test_the_limits_are_where_they_are_said_to_be() -> None:
    one = parse("step = 1")
    chain(32, one, last=True)
    Or((one,) * 500)
    with pytest.raises(UsageError, match="nests"):
        chain(33, one, last=True)
    with pytest.raises(UsageError, match="nests"):
        Not(chain(32, one, last=True))
    with pytest.raises(UsageError, match="more than 500"):
        Or((one,) * 501)
