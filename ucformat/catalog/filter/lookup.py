"""Whether a catalog has the metrics and configuration paths that a filter uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select

from ucformat.catalog.filter.documents import document_test
from ucformat.catalog.filter.names import Names, check_known, paths_of, used_names
from ucformat.catalog.models import Config, Metric

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from ucformat.catalog.filter.syntax import Node, Sort

__all__ = ["check_names"]

_SAMPLE = 200  # of the newest configurations are looked through for the nearest path


def check_names(connection: Connection, node: Node | Sort, text: str | None = None) -> None:
    """UsageError where no checkpoint has a metric or configuration path that is used; it offers the nearest.

    It points into `text`, where that is what the node was read from. In a catalog without metrics, or without
    configurations, none is unknown.
    """
    used = used_names(node)
    metrics = {name for name in used.metrics if _has_metric(connection, name)}
    configs = {path for path in used.configs if _has_path(connection, path)}
    if metrics != used.metrics:
        metrics.update(connection.scalars(select(Metric.name).distinct()))
    if configs != used.configs:
        newest = select(Config.document).order_by(Config.id.desc()).limit(_SAMPLE)
        configs.update(path for document in connection.scalars(newest) for path in paths_of(document))
    check_known(node, Names(frozenset(metrics), frozenset(configs)), text)


def _has_metric(connection: Connection, name: str) -> bool:
    return connection.scalar(select(Metric.checkpoint).where(Metric.name == name).limit(1)) is not None


def _has_path(connection: Connection, path: tuple[str, ...]) -> bool:
    named = document_test(Config.document, path, lambda found: found.named())
    return connection.scalar(select(Config.id).where(named).limit(1)) is not None
