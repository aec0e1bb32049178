"""Filters at random: over all keys, with values that the rows of `world` have, or nearly have."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.catalog.filter.world import (
    BIG,
    FLOATS,
    INTEGERS,
    METRICS,
    NAMES,
    NOW,
    TEXTS,
    TIMES,
    WORLDS,
)
from ucformat.catalog.entries import KEYS, Kind
from ucformat.catalog.filter.syntax import (
    Age,
    And,
    Boolean,
    Compare,
    In,
    IsNull,
    KeyPath,
    Like,
    Node,
    Not,
    Number,
    Or,
    SizeLiteral,
    Sort,
    SortKey,
    Text,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

OPERATORS = ["=", "!=", "<", "<=", ">", ">="]

any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
texts = (st.sampled_from(TEXTS) | any_text).map(Text)
floats = st.floats(-(2.0**53), 2.0**53) | st.sampled_from(FLOATS)
numbers = (st.sampled_from([*INTEGERS, *BIG]) | st.integers(-(2**70), 2**70) | floats).map(Number)
truths = st.booleans().map(Boolean)
sizes = st.sampled_from([0, 1, 1000, 1024, 1536, 10**9, 2**62]).map(SizeLiteral)
times = st.sampled_from(
    [written for t in TIMES for written in (f"{t}", f"{t.replace(tzinfo=None)}", f"{t.date()}")]
)
ages = st.sampled_from(
    [NOW - t for t in TIMES] + [timedelta(days=d) for d in (7, 1.5, -3, 10**6, -(10**8))]
)
words = st.sampled_from(
    ["4096", "4096,1024", "weight", "float32", "xxh3:1", "a", "committed", "deepspeed"]
)

#: What a key of this kind is compared with.
LITERALS: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.TEXT: texts | words.map(Text),
    Kind.INTEGER: numbers,
    Kind.SIZE: numbers | sizes,
    Kind.FLOAT: numbers,
    Kind.TIME: times.map(Text),
    Kind.AGE: ages.map(Age),
    Kind.BOOLEAN: truths,
    Kind.JSON: texts | numbers | truths | sizes,
}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a document and their paths."""
    if isinstance(value, dict | list):
        for name, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(below, (*path, str(name)))
    else:
        yield path, value


def near(value: Any) -> list[Value]:
    """Literals that a value equals, or hardly does not."""
    match value:
        case bool():
            return [Boolean(value), Number(int(value)), Text(str(value).lower())]
        case int():
            return [
                Number(value),
                Number(value + 1),
                Number(value - 1),
                Number(float(value)),
                Text(str(value)),
            ]
        case float():
            return [
                Number(value),
                Number(math.nextafter(value, 0)),
                Number(math.nextafter(value, math.inf)),
            ]
        case str():
            return [Text(value), Text(value.upper()), Text(value + "a")]
        case _:
            return [Text("null")]


FOUND = [
    (KeyPath((root, *path)), near(value))
    for rows in WORLDS.values()
    for row in rows
    for root, document in row.documents.items()
    for path, value in leaves(document)
]

paths = st.builds(
    lambda root, path: KeyPath((root, *path)),
    st.sampled_from([key.root for key in KEYS if key.kind is Kind.JSON]),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
)
metrics = st.sampled_from(METRICS).map(lambda name: KeyPath(("metric", name)))

#: Name -> kind of values, the keys, and what they are compared with.
Subject = tuple[Kind, st.SearchStrategy[tuple[KeyPath, st.SearchStrategy[Any]]]]
SUBJECTS: dict[str, Subject] = {
    **{
        key.name: (key.kind, st.just((KeyPath(tuple(key.name.split("."))), LITERALS[key.kind])))
        for key in KEYS
        if key.kind is not None and not key.name.endswith(("NAME", "PATH"))
    },
    "metric": (Kind.FLOAT, metrics.map(lambda key: (key, LITERALS[Kind.FLOAT]))),
    "paths": (Kind.JSON, paths.map(lambda key: (key, LITERALS[Kind.JSON]))),
    "found": (
        Kind.JSON,
        st.sampled_from(FOUND).map(lambda f: (f[0], st.sampled_from(f[1]) | LITERALS[Kind.JSON])),
    ),
}

patterns = (st.text("aAbGgod%_\\*?[]é😀日10,'", max_size=5) | st.sampled_from(TEXTS)).filter(
    lambda p: (len(p) - len(p.rstrip("\\"))) % 2 == 0
)


@st.composite
def atoms_of(draw: st.DrawFn, subject: Subject) -> Compare | In | Like | IsNull:
    """One comparison of such a key."""
    kind, keys = subject
    key, literals = draw(keys)
    forms = ["compare", "compare", "in", "null"] + ["like"] * (kind in {Kind.TEXT, Kind.JSON})
    match draw(st.sampled_from(forms)):
        case "in":
            return In(
                key, tuple(draw(st.lists(literals, min_size=1, max_size=4))), draw(st.booleans())
            )
        case "null":
            return IsNull(key, draw(st.booleans()))
        case "like":
            return Like(key, Text(draw(patterns)), draw(st.booleans()))
    value = draw(literals)
    return Compare(
        key,
        draw(st.sampled_from(OPERATORS[:2] if isinstance(value, Boolean) else OPERATORS)),
        value,
    )


def joined(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(inner, min_size=2, max_size=4).map(tuple)
    return st.builds(And, several) | st.builds(Or, several) | st.builds(Not, inner)


atoms = st.sampled_from([*SUBJECTS.values(), *[SUBJECTS["found"], SUBJECTS["metric"]] * 6]).flatmap(
    atoms_of
)
filters: st.SearchStrategy[Node] = st.recursive(atoms, joined, max_leaves=8)

scalars = st.sampled_from(
    [
        KeyPath((key.name,))
        for key in KEYS
        if key.kind not in {None, Kind.BOOLEAN} and "." not in key.name and not key.many
    ]
)
sort_keys = scalars | metrics | paths | st.sampled_from(FOUND).map(lambda f: f[0])
sorts = st.builds(
    Sort, st.lists(st.builds(SortKey, sort_keys, st.booleans()), min_size=1, max_size=3).map(tuple)
)
