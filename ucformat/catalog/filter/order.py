"""From an order to SQL: the same on both engines, and of one order even where values are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from ucformat.catalog.filter.check import check
from ucformat.catalog.filter.documents import document_order
from ucformat.catalog.filter.engines import by_code_point
from ucformat.catalog.filter.keys import Kind, resolve
from ucformat.catalog.filter.sources import document_of, source_of
from ucformat.catalog.models import Checkpoint, Config, Metric, Run

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import ColumnElement

    from ucformat.catalog.filter.keys import Target
    from ucformat.catalog.filter.syntax import Sort

__all__ = ["compile_sort"]


def compile_sort(sort: Sort, *, now: datetime | None = None) -> list[ColumnElement[Any]]:  # noqa: ARG001
    """What to give to `select(Checkpoint).order_by(*…)`: what has no value comes last.

    Of equals, the last recorded comes first. `now` is taken as `compile_filter` takes it; no order depends on it yet.
    """
    check(sort)
    ordered = []
    for by in sort.keys:
        target = resolve(by.key)
        down = by.descending is not (target.kind is Kind.AGE)  # the older, the earlier
        ordered += [(value.desc() if down else value.asc()).nulls_last() for value in _values(target)]
    return [*ordered, Checkpoint.serial.desc()]


def _values(target: Target) -> list[ColumnElement[Any]]:
    match target.root:
        case "config":
            own = Config.id == Checkpoint.config_id
            return document_order(
                Config.document,
                target.path,
                lambda value: select(value).where(own).correlate(Checkpoint).scalar_subquery(),
            )
        case "topology" | "producer":
            return document_order(document_of(target.root).column, target.path)
        case "run":
            name = select(Run.name).where(Run.id == Checkpoint.run_id).correlate(Checkpoint).scalar_subquery()
            return [by_code_point(name)]
        case "metric":
            named = Metric.checkpoint == Checkpoint.serial, Metric.name == target.path[0]
            return [select(Metric.value).where(*named).correlate(Checkpoint).scalar_subquery()]
        case _:
            column = source_of(target).column
            return [by_code_point(column) if target.kind is Kind.TEXT else column]
