"""The filter language of the catalog (docs/filters.md): parsed, type-checked and compiled to SQL.

`parse` turns text into a tree, `unparse` turns it back, and `compile_filter` turns it into a
condition on `models.Checkpoint`; `parse_sort` and `compile_sort` do the same for sort orders.
`check_names` rejects metrics and configuration paths that no checkpoint of a catalog has, and
offers the nearest ones.
"""

from __future__ import annotations

from ucformat.catalog.filter.check import Names, check_known, paths_of, used_keys, used_names
from ucformat.catalog.filter.compile import check_names, compile_filter, compile_rows, compile_sort
from ucformat.catalog.filter.parse import parse, parse_sort
from ucformat.catalog.filter.syntax import Node, Sort, operands, unparse

__all__ = [
    "Names",
    "Node",
    "Sort",
    "check_known",
    "check_names",
    "compile_filter",
    "compile_rows",
    "compile_sort",
    "operands",
    "parse",
    "parse_sort",
    "paths_of",
    "unparse",
    "used_keys",
    "used_names",
]
