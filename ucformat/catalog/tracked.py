"""What a tracker of experiments has of checkpoints: metrics, and a part of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.labels import add_metrics
from ucformat.catalog.models import CheckpointRow, Config
from ucformat.catalog.recording import config_rows
from ucformat.catalog.rows import event, lock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from ucformat.catalog.stamp import Stamp


@dataclass(frozen=True, slots=True)
class TrackedValues:
    """Metrics of a checkpoint, and what its configuration gets below the tracker's name; None for nothing."""

    metrics: Mapping[str, float]
    config: Mapping[str, Any] | None = None


def add_tracked(
    connection: Connection,
    serial: int,
    tracker: str,
    values: TrackedValues,
    stamp: Stamp,
    *,
    replace: bool,
) -> bool:
    """Add what a tracker has of a checkpoint; returns whether a metric was recorded."""
    lock(connection, [serial])
    if values.config is not None:
        document = connection.scalar(
            sa.select(Config.document)
            .join(CheckpointRow, CheckpointRow.config_id == Config.id)
            .where(CheckpointRow.serial == serial)
        )
        [config] = config_rows(connection, [{**(document or {}), tracker: values.config}])
        connection.execute(
            sa.update(CheckpointRow).where(CheckpointRow.serial == serial).values(config_id=config)
        )
        run = {key: values.config.get(key) for key in ("run_id", "run_name")}
        event(connection, "import", stamp, serial, tracker=tracker, **run)
    return add_metrics(connection, serial, values.metrics, stamp, replace=replace)
