"""The filter language of the catalog (docs/filters.md): read, checked, and made into SQL.

`parse` gives the tree of a filter and `unparse` its text again, `compile_filter` a condition on `models.Checkpoint`;
`parse_sort` and `compile_sort` do the same for orders. `check_names` asks a catalog whether it has the metrics and the
configuration paths that a filter uses: one that nobody has is an error that offers the nearest.
"""

from __future__ import annotations

from ucformat.catalog.filter.compile import compile_filter
from ucformat.catalog.filter.lookup import check_names
from ucformat.catalog.filter.names import Names, check_known, paths_of, used_keys, used_names
from ucformat.catalog.filter.order import compile_sort
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.filter.syntax import Node, Sort, unparse

__all__ = [
    "Names",
    "Node",
    "Sort",
    "check_known",
    "check_names",
    "compile_filter",
    "compile_sort",
    "parse",
    "parse_sort",
    "paths_of",
    "unparse",
    "used_keys",
    "used_names",
]
