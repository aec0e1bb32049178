"""What the page of checkpoints shows: those that match a filter, their values, and completions of the filter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ucformat.catalog.columns import parse_columns
from ucformat.catalog.filter.syntax import MAX_LENGTH
from ucformat.catalog.search import NEWEST
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.catalog.columns import Column
    from ucformat.catalog.entries import Entry
    from ucformat.web.library import Access, Library

#: Rows of a page.
PAGE = 50
_MOST_OFFSET = 1_000_000
_DIGITS = 30
_COUNTED = 200  # the first in the order, among which values are counted
_SAMPLED = 100  # the newest, whose metrics and configurations are offered
_OFFERED = 40
#: Metrics that are drawn beside a run, if it has one of them.
_DRAWN = ("loss", "train_loss", "train/loss", "val_loss", "eval_loss", "val/loss", "eval/loss")
#: A key that is being written at the end of a filter.
_KEY = re.compile(r"(?:^|[\s(,])((?:[^\W\d][\w-]*)(?:\.(?:[\w-]++|\"[^\"]*+\"?+))*+\.?)\Z")


def list_data(library: Library, access: Access, asked: Mapping[str, str]) -> dict[str, Any]:
    """The data of the page.

    Args:
        asked: `where`, `sort`, `columns` and `offset` as a client wrote them.
    """
    where, sort = asked.get("where", "").strip(), asked.get("sort", "").strip()
    offset = _offset(asked.get("offset", ""))
    data: dict[str, Any] = {
        "where": where,
        "asked": {"sort": sort, "columns": asked.get("columns", "").strip()},
        "offset": offset,
        "error": None,
        "total": None,
        "columns": [],
        "checkpoints": [],
        "facets": {"run": {}, "kind": {}, "tag": {}},
        "counted": _COUNTED,
        "series": {},
        "more": False,
        "places": library.visible_places(access),
    }
    try:
        asked_columns = (
            parse_columns(data["asked"]["columns"]) if data["asked"]["columns"] else None
        )
        page = library.page(
            access, where, sort or NEWEST, limit=PAGE + 1, offset=offset, counted=_COUNTED
        )
    except UsageError as error:
        return data | {"error": {"message": error.message, "hint": error.hint}}
    entries = page.entries[:PAGE]
    data["more"] = len(page.entries) > PAGE
    data["total"] = page.total
    data["facets"] |= page.counts
    columns = asked_columns or _default(entries)
    data["columns"] = [{"text": c.text, "right": c.right(entries)} for c in columns]
    data["checkpoints"] = [
        {
            "id": e.id,
            "name": e.name,
            "run": e.run,
            "state": e.state,
            "cells": [c.cell(e, short=True) for c in columns],
        }
        for e in entries
    ]
    if library.catalog is not None:
        data["series"] = _series(library, access, entries)
    return data


def _offset(text: str) -> int:
    is_number = text.isascii() and text.isdecimal()
    # few digits: Python refuses to convert thousands of them
    return min(int(text[:_DIGITS]), _MOST_OFFSET) if is_number else 0


def _default(entries: Sequence[Entry]) -> list[Column]:
    """Those of `ucp ls` on a narrow terminal, without those that are empty."""
    gone = any(e.state != "committed" for e in entries)
    state = "state," if gone else ""
    columns = parse_columns(f"name,id,kind,{state}size,age,alias,tag,metrics")
    return [c for c in columns if not c.empty(entries)]


def _series(library: Library, access: Access, entries: Sequence[Entry]) -> dict[str, Any]:
    """The losses of the runs on a page."""
    metrics: dict[str, str] = {}
    for entry in entries:
        name = _drawn(entry.metrics)
        if entry.run is not None and name is not None:
            metrics.setdefault(entry.run, name)
    assert library.catalog is not None  # noqa: S101 - it has the entries
    series = library.catalog.series(metrics, library.within(access))
    return {
        run: {"metric": metrics[run], "points": [list(p) for p in points]}
        for run, points in series.items()
        if len(points) > 1
    }


def _drawn(metrics: Mapping[str, float]) -> str | None:
    """The metric that is drawn: a loss."""
    named = next((name for name in _DRAWN if name in metrics), None)
    return named or next((name for name in sorted(metrics) if "loss" in name.lower()), None)


def completions(library: Library, access: Access, text: str) -> list[str]:
    """Filters that continue one, of which the key at the end is not complete."""
    match = _KEY.search(text) if len(text) <= MAX_LENGTH else None
    if match is None or text.count("'") % 2:
        return []
    begun = match[1]
    names = dict.fromkeys(_names(library, access))
    folded = begun.casefold()
    near = [n for n in names if n.casefold().startswith(folded) and n != begun]
    near += [n for n in names if folded in n.casefold() and n not in near and n != begun]
    return [text[: match.start(1)] + name for name in near[:_OFFERED]]


def _names(library: Library, access: Access) -> Iterator[str]:
    """The keys of filters, with the metrics and configuration paths of the newest checkpoints."""
    from ucformat.catalog.entries import KEYS
    from ucformat.catalog.filter.check import Names, paths_of

    newest = library.entries(access, limit=_SAMPLED)
    seen = Names(
        frozenset(name for e in newest for name in e.metrics),
        frozenset(path for e in newest for path in paths_of(e.config)),
    )
    yield from (
        k.name
        for k in KEYS
        if k.kind is not None
        and not k.name.endswith(("NAME", "PATH"))
        and not (k.name == "url" and library.is_limited(access))
    )
    yield from seen.spelled()
