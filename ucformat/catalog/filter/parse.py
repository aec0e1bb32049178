"""From the text of a filter to its tree."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from ucformat.catalog.filter.check import check
from ucformat.catalog.filter.names import Names, check_known
from ucformat.catalog.filter.pointing import pointing_error
from ucformat.catalog.filter.values import LONGEST
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from ucformat.catalog.filter.grammar import Reader
    from ucformat.catalog.filter.syntax import Node, Sort

__all__ = ["parse", "parse_sort"]


def parse(text: str, *, known: Names | None = None) -> Node:
    """The tree of a filter such as `step > 1000 and tag = 'good'`.

    UsageError, pointing at the place, where it is none, or where `known` is given and has not a metric or configuration
    path that is used.
    """
    node = cast("Node", _read(text, "filter"))
    _check(node, text, known)
    return node


def parse_sort(text: str, *, known: Names | None = None) -> Sort:
    """What to order by: `step`, `-metric.val_loss,step` or `created:desc`; errors as of `parse`."""
    sort = cast("Sort", _read(text, "sort"))
    _check(sort, text, known)
    return sort


def _read(text: str, start: str) -> Node | Sort:
    if len(text) > LONGEST:
        raise UsageError(f"a filter has at most {LONGEST} characters, and not {len(text)}")
    for i, c in enumerate(text):
        if c == "\0" or "\ud800" <= c <= "\udfff":
            raise pointing_error("a filter cannot hold this character", text, (i, i + 1), hint=f"it is U+{ord(c):04X}")
    return _reader().read(text, start)


def _check(node: Node | Sort, text: str, known: Names | None) -> None:
    check(node, text, more=known.written() if known else ())
    if known:
        check_known(node, known, text)


@cache
def _reader() -> Reader:
    from ucformat.catalog.filter.grammar import Reader  # lark is loaded when a filter is read

    return Reader()
