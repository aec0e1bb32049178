"""What is read is what was written."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.filter.strategies import OPERATORS, any_text, filters, sorts
from ucformat.catalog.entries import KEYS, Kind
from ucformat.catalog.filter.check import used_keys, used_names
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.filter.syntax import (
    Age,
    And,
    Boolean,
    Compare,
    In,
    IsNull,
    KeyPath,
    Like,
    Not,
    Number,
    Or,
    SizeLiteral,
    Sort,
    SortKey,
    Text,
    unparse,
)
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from ucformat.catalog.filter.syntax import Node, Value

STEP, TAG, LOSS = KeyPath(("step",)), KeyPath(("tag",)), KeyPath(("metric", "val_loss"))
LR = KeyPath(("config", "optimizer", "lr"))
ONE = Compare(STEP, "=", Number(1))

EXAMPLES: dict[str, Node] = {
    "step > 1000 and (tag = 'good' or metric.val_loss < 2.1) and config.optimizer.lr in (1e-4, 3e-4)": And(
        (
            Compare(STEP, ">", Number(1000)),
            Or((Compare(TAG, "=", Text("good")), Compare(LOSS, "<", Number(2.1)))),
            In(LR, (Number(1e-4), Number(3e-4))),
        )
    ),
    "step=1": ONE,
    "step == 1": ONE,
    "step <> 1": Compare(STEP, "!=", Number(1)),
    "((step = 1))": ONE,
    " step\n=\t1 ": ONE,
    "not step = 1 and tag = 'a' or tag = 'b'": Or(
        (And((Not(ONE), Compare(TAG, "=", Text("a")))), Compare(TAG, "=", Text("b")))
    ),
    "NOT(step = 1 OR step = 1)": Not(Or((ONE, ONE))),
    "step = 1 and (step = 1 and step = 1)": And((ONE, And((ONE, ONE)))),
    "tag Not In ('a', \"b\")": In(TAG, (Text("a"), Text("b")), negated=True),
    "tag like '50\\%'": Like(TAG, Text("50\\%")),
    "tag not like 'a%'": Like(TAG, Text("a%"), negated=True),
    "tag is null": IsNull(TAG),
    "tag IS NOT NULL": IsNull(TAG, negated=True),
    "tag = 'it''s'": Compare(TAG, "=", Text("it's")),
    'tag = "it\'s ""it"""': Compare(TAG, "=", Text('it\'s "it"')),
    "tag = ''": Compare(TAG, "=", Text("")),
    "tag = 'a\\n'": Compare(TAG, "=", Text("a\\n")),
    "hold = TRUE": Compare(KeyPath(("hold",)), "=", Boolean(True)),
    "step > -5": Compare(STEP, ">", Number(-5)),
    "step > +5": Compare(STEP, ">", Number(5)),
    "metric.x < .5": Compare(KeyPath(("metric", "x")), "<", Number(0.5)),
    "metric.x < 1.": Compare(KeyPath(("metric", "x")), "<", Number(1.0)),
    "metric.x < -1E+3": Compare(KeyPath(("metric", "x")), "<", Number(-1000.0)),
    "age < 1.5d": Compare(KeyPath(("age",)), "<", Age(timedelta(hours=36))),
    "age < 36h": Compare(KeyPath(("age",)), "<", Age(timedelta(hours=36))),
    "age in (2w, 3m, 4s)": In(
        KeyPath(("age",)), tuple(Age(timedelta(seconds=s)) for s in (1209600, 180, 4))
    ),
    "size > 10GB": Compare(KeyPath(("size",)), ">", SizeLiteral(10**10)),
    "size > 1.5gib": Compare(KeyPath(("size",)), ">", SizeLiteral(3 * 2**29)),
    "size > 7b": Compare(KeyPath(("size",)), ">", SizeLiteral(7)),
    "size > 0.1GiB": Compare(KeyPath(("size",)), ">", SizeLiteral(107374182)),
    'config."a.b".c = 1': Compare(KeyPath(("config", "a.b", "c")), "=", Number(1)),
    "config.'a\"b' = 1": Compare(KeyPath(("config", 'a"b')), "=", Number(1)),
    "config.betas.0 = 1": Compare(KeyPath(("config", "betas", "0")), "=", Number(1)),
    "config.and.in.null.true is null": IsNull(KeyPath(("config", "and", "in", "null", "true"))),
    "config.größe-1.x = 1": Compare(KeyPath(("config", "größe-1", "x")), "=", Number(1)),
    'metric."val/loss" < 1': Compare(KeyPath(("metric", "val/loss")), "<", Number(1)),
    "created > '2026-11-01'": Compare(KeyPath(("created",)), ">", Text("2026-11-01")),
    "tensor.shape like '%,4096'": Like(KeyPath(("tensor", "shape")), Text("%,4096")),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples(text: str) -> None:
    assert repr(parse(text)) == repr(EXAMPLES[text])  # equality alone takes 1 for 1.0


def test_what_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "filters.md").read_text()
    examples = re.findall(r"^\| `(.+?)` \|", page[page.index("## Examples") :], re.MULTILINE)
    assert len(examples) >= 10
    for text in [
        *examples,
        *re.findall(r'ucp ls "(.+)"', page),
        *re.findall(r'find\("(.+?)"', page),
    ]:
        parse(text)
    for text in [*re.findall(r'sort="(.+?)"', page), *re.findall(r"--sort=([^`]+)`", page)]:
        parse_sort(text)


#: What docs/filters.md calls the values that a key is compared with.
COMPARED = {
    Kind.TEXT: "text",
    Kind.INTEGER: "a number",
    Kind.SIZE: "a number, a size",
    Kind.FLOAT: "a number",
    Kind.TIME: "a time",
    Kind.AGE: "an age",
    Kind.BOOLEAN: "`true`, `false`",
    Kind.JSON: "text, a number, `true`, `false`",
}


def test_the_table_of_keys_is_in_the_documents() -> None:
    page = (Path(__file__).parents[3] / "docs" / "filters.md").read_text()
    table = page[page.index("## Keys") : page.index("Without `state`")]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{key.name}` | {key.about} | {'only a column' if key.kind is None else COMPARED[key.kind]} |"
        for key in KEYS
    ]


def test_a_text_that_is_written_is_the_shortest_that_is_exact() -> None:
    for text in (
        "size > 10GB", "size > 1536MiB", "size = 1001B", "age < 36h", "age < 2w", "age < -0.000001s",
        "not (step = 1 or hold = true)", 'config."a.b".c = 0.0001', "config.betas.0 = 1", 'config."in" is not null',
        "tag not in ('it''s')", "-step,age",
    ):  # fmt: skip
        read = parse_sort if text.startswith("-") else parse
        assert unparse(read(text)) == text


@given(filters)
def test_filters_survive_being_written(node: Node) -> None:
    again = parse(unparse(node))
    assert again == node
    assert repr(again) == repr(node)


@given(st.lists(any_text, min_size=1, max_size=5), any_text)
def test_any_text_survives(path: list[str], text: str) -> None:
    node = Compare(KeyPath(("config", *path)), "=", Text(text))
    assert parse(unparse(node)) == node
    named = IsNull(KeyPath(("metric", text)))
    assert parse(unparse(named)) == named


numbers = st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.sampled_from([("config.x", OPERATORS), ("metric.x", OPERATORS)]),
    st.data(),
    numbers.map(Number) | st.integers(-(10**30), 10**30).map(SizeLiteral),
)
def test_any_number_survives(
    where: tuple[str, list[str]], data: st.DataObject, value: Value
) -> None:
    node = Compare(KeyPath(tuple(where[0].split("."))), data.draw(st.sampled_from(where[1])), value)
    assert repr(parse(unparse(node))) == repr(node)


@given(st.timedeltas())
def test_any_age_survives(span: timedelta) -> None:
    node = Compare(KeyPath(("age",)), "<", Age(span))
    assert parse(unparse(node)) == node


@given(sorts)
def test_orders_survive_being_written(sort: Sort) -> None:
    assert parse_sort(unparse(sort)) == sort


def test_orders() -> None:
    down = Sort((SortKey(LOSS, descending=True), SortKey(STEP)))
    for text in (
        "-metric.val_loss,step",
        " metric.val_loss : DESC , step:asc",
        '-metric."val_loss", step',
    ):
        assert parse_sort(text) == down


def test_the_names_that_are_used() -> None:
    node = parse("not (metric.a < 1 or config.x.y in (1)) and tensor.state = 'a' and tag is null")
    assert used_names(node).metrics == {"a"}
    assert used_names(node).configs == {("x", "y")}
    assert used_keys(node) == {"metric.a", "config.x.y", "tensor.state", "tag"}
    assert used_keys(parse_sort('-step,config."a.b"')) == {"step", 'config."a.b"'}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Number(float("nan")),
        lambda: Number(float("inf")),
        lambda: Number(10**400),
        lambda: Number(True),
        lambda: Text("\0"),
        lambda: Text("\ud800"),
        lambda: Text("x" * 10_001),
        lambda: KeyPath(()),
        lambda: KeyPath(("config",) * 33),
        lambda: KeyPath(("a\0",)),
        lambda: Compare(STEP, "; drop", Number(1)),
        lambda: In(STEP, ()),
        lambda: And((ONE,)),
        lambda: Like(TAG, Text("\\")),
        lambda: Sort(()),
    ],
)
def test_trees_that_no_text_has_are_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


def test_lark_is_loaded_with_the_filter_language_alone() -> None:
    code = (
        "import sys, ucformat.catalog.catalog; assert 'lark' not in sys.modules; "
        "import ucformat.catalog.filter.parse; print('lark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
