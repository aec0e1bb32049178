"""What cannot be read is shown with its place, and with what may have been meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.filter.world import NOW
from ucformat.catalog.filter.check import Names, check_known, paths_of
from ucformat.catalog.filter.compile import compile_filter
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.filter.syntax import (
    Compare,
    IsNull,
    KeyPath,
    Number,
    Sort,
    SortKey,
    Text,
    unparse,
)
from ucformat.errors import UsageError

KNOWN = Names(
    frozenset({"val_loss", "val/acc"}), frozenset({("optimizer", "lr"), ("a.b", "c"), ("layers",)})
)

#: Filter -> what the carets stand under, and what the hint says.
ERRORS = {
    "": ("", "expected a key"),
    "step": ("", "a comparison such as = or <"),
    "step >": ("", "a value"),
    "tag in ('1', 2": ("", "a comma or )"),
    "(step = 1": ("", "expected )"),
    "tag = good": ("good", "put text in quotes: 'good'"),
    "tag = 'x": ("'", "double a quote"),
    "size = 10XB": ("XB", "TiB"),
    "step = 1 b": ("b", "and"),
    "step = 1 && b": ("&", "and, or, not"),
    "step = 1 ; drop": (";", "and"),
    "step not = 1": ("=", "in or like"),
    "step = )": (")", "a value"),
    "tag in ()": (")", "a value"),
    "step is 5": ("5", "null"),
    "tag like 5": ("5", "text in quotes"),
    "tag = null": ("null", "KEY is null"),
    "config.1e5 = 1": ("e5", "a dot"),
    "stpe = 1": ("stpe", "did you mean step"),
    "foo.bar = 1": ("foo.bar", "config.PATH"),
    "tag.x = 1": ("tag.x", "write tag alone"),
    "metric < 1": ("metric", "metric.val_loss"),
    "metric.a.b < 1": ("metric.a.b", 'metric."a.b"'),
    "config = 1": ("config", "config.a.b"),
    "tensor.nme = 'a'": ("tensor.nme", "did you mean tensor.name"),
    "tensor = 'a'": ("tensor", "tensor.name"),
    "metric.val_lss < 2": ("metric.val_lss", "did you mean metric.val_loss"),
    "metric.acc < 2": ("metric.acc", 'metric."val/acc"'),
    "config.optimzer.lr = 1": ("config.optimzer.lr", "did you mean config.optimizer.lr"),
    "val_loss < 2": ("val_loss", "did you mean metric.val_loss"),
    "optimizer.lr = 3": ("optimizer.lr", "did you mean config.optimizer.lr"),
    "step = 'abc'": ("'abc'", "it takes a number"),
    "step = 10GB": ("10GB", "it takes a number"),
    "size > 7d": ("7d", "10GB"),
    "age < 7": ("7", "7d or 36h"),
    "age < '2026-01-01'": ("'2026-01-01'", "7d or 36h"),
    "config.layers < 7d": ("7d", "true or false"),
    "tag = 1": ("1", "text in quotes"),
    "tag in ('a', 1)": ("1", "text in quotes"),
    "created > 'yesterday'": ("'yesterday'", "2026-11-01"),
    "created > '0001-01-01T00:00:00+14:00'": ("'0001-01-01T00:00:00+14:00'", "2026-11-01"),
    "verified < true": ("true", "= or !="),
    "verified = 1": ("1", "true or false"),
    "config.layers >= false": ("false", "= or !="),
    "step like 'a'": ("step", None),
    "tag like 'a\\'": ("'a\\'", r"\\"),
    "step = 1e999": ("1e999", "1.7e308"),
    "tag = '\x00'": (" ", "U+0000"),
    "step = 1 and \n\n tag = x": ("x", "quotes"),
    "tag = '日本é' and x = 1": ("x", "the keys are"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_the_place_is_shown(text: str) -> None:
    place, hint = ERRORS[text]
    with pytest.raises(UsageError) as caught:
        check_known(parse(text, lambda: KNOWN), KNOWN, text)
    message, line, carets = caught.value.message.split("\n")
    assert message
    start = carets.index("^") - text.count("日") - text.count("本")  # these are two columns wide
    assert carets.strip() == "^" * max(1, len(place))
    assert line[start : start + len(place)] == place
    assert hint is None or hint in str(caught.value.hint), caught.value.hint


#: Order -> what the carets stand under, and what the hint says.
SORT_ERRORS = {
    "": ("", "expected a key or -"),
    "step:": ("", "asc or desc"),
    "-step:asc": ("asc", "either a minus"),
    "tag": ("tag", "metric.NAME"),
    "hold": ("hold", "metric.NAME"),
    "tensor.size": ("tensor.size", "metric.NAME"),
    "-stpe": ("stpe", "did you mean step"),
    "step,": ("", "a key"),
    "step tag": ("tag", "a comma"),
    "metric.val_lss": ("metric.val_lss", "metric.val_loss"),
}


@pytest.mark.parametrize("text", SORT_ERRORS)
def test_the_place_is_shown_in_orders(text: str) -> None:
    place, hint = SORT_ERRORS[text]
    with pytest.raises(UsageError) as caught:
        check_known(parse_sort(text, lambda: KNOWN), KNOWN, text)
    _, line, carets = caught.value.message.split("\n")
    assert carets.strip() == "^" * max(1, len(place))
    assert line[carets.index("^") :].startswith(place)
    assert hint in str(caught.value.hint)


def test_an_error_reads_well() -> None:
    with pytest.raises(UsageError) as caught:
        parse("step > 1000 and metrics.loss < 2")
    assert str(caught.value) == (
        "unknown key metrics.loss\n"
        "  step > 1000 and metrics.loss < 2\n"
        "                  ^^^^^^^^^^^^\n"
        "  hint: did you mean metric?"
    )


def test_of_a_long_filter_the_neighbourhood_is_shown() -> None:
    text = "step = 1 or " * 200 + "stpe = 2" + " or step = 1" * 200
    with pytest.raises(UsageError) as caught:
        parse(text)
    _, line, carets = caught.value.message.split("\n")
    assert len(line) < 120
    assert line[carets.index("^") :].startswith("stpe = 2 or")
    assert line.startswith("  …")
    assert line.endswith("…")


def test_nothing_reaches_a_terminal_that_it_would_obey() -> None:
    for text in (
        "\x1b[2J = 1",
        "'\x1b[2J' = 1",
        "tag = \x1b[2J",
        "step = '\x1b]0;x\x07\u202e'",
        "config.a = 1 or 'x\ny' = 1",
    ):
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert all(line.isprintable() for line in str(caught.value).split("\n")), text
        assert len(str(caught.value).split("\n")) == 4


@given(st.text() | st.text("stepag='\"()<>!.,1dGB %_\\-+ andornotinlikeisnull", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (parse, parse_sort):
        try:
            node = read(text)
        except UsageError as e:
            assert e.hint or "\n" in e.message  # noqa: PT017
        else:
            assert read(unparse(node)) == node


def test_names_are_checked_where_they_are_known() -> None:
    for text in (
        "metric.val_loss < 1",
        'config."a.b".c = 1',
        'config."a.b" is null',
        "config.layers.3.x = 1",
    ):
        check_known(parse(text), KNOWN)
    # an empty catalog knows nothing
    check_known(parse("metric.nonsense < 1 and config.nonsense = 1"), Names())
    check_known(parse("metric.nonsense < 1"), Names(configs=frozenset({("a",)})))
    with pytest.raises(UsageError, match=r"config\.layers\.x"):
        check_known(parse("config.layers.x = 1"), KNOWN)
    with pytest.raises(UsageError) as caught:
        check_known(IsNull(KeyPath(("metric", "val_lss"))), KNOWN)
    assert "metric.val_loss" in str(caught.value.hint)


def test_paths_of_a_document() -> None:
    document = {"a": {"b": 1, "c": {}}, "d": [{"e": 1}], "f": None}
    assert set(paths_of(document)) == {("a", "b"), ("a", "c"), ("d",), ("f",)}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Compare(KeyPath(("stpe",)), "=", Number(1)), "unknown key stpe"),
        (Compare(KeyPath(("step",)), "=", Text("a")), "step cannot be compared with 'a'"),
        (Compare(KeyPath(("created",)), "<", Text("a")), "'a' is not a time"),
    ],
)
def test_trees_made_by_hand_are_checked_too(node: Compare, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compile_filter(node, now=NOW)
    assert caught.value.message == message


def test_what_is_made_by_hand_needs_a_zone_and_an_order() -> None:
    from ucformat.catalog.filter.compile import compile_sort

    with pytest.raises(UsageError, match="zone"):
        compile_filter(parse("age < 7d"), now=NOW.replace(tzinfo=None))
    with pytest.raises(UsageError, match="cannot be sorted by"):
        compile_sort(Sort((SortKey(KeyPath(("tag",))),)))
