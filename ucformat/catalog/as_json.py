"""The values of the catalog as JSON, the same in all commands and on the server."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import HoldEntry

if TYPE_CHECKING:
    from ucformat.catalog.content import ListedTensor
    from ucformat.catalog.diff import Changed
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.retention import RetentionPlan, RetentionRow

_NAMES = {"nbytes": "bytes", "files_nbytes": "files_bytes", "disk_nbytes": "disk_bytes"}


def entry_data(entry: Entry) -> dict[str, Any]:
    """The JSON of a checkpoint in the catalog: all that `Entry` has, and the name."""
    attributes: dict[str, Any] = data_of(entry)
    return {"id": entry.id, "name": entry.name} | attributes


def change_data(change: Changed) -> dict[str, Any]:
    """The JSON of a value that differs; a side that does not have the value lacks it."""
    from ucformat.catalog.diff import MISSING  # whose module needs the database

    sides = {"a": change.a, "b": change.b}
    return {"path": change.path} | {k: v for k, v in sides.items() if v is not MISSING}


def tensor_data(tensor: ListedTensor) -> dict[str, Any]:
    """The JSON of a tensor in the catalog."""
    return {
        "name": tensor.name,
        "state": tensor.state,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
    }


def row_data(row: RetentionRow, **extra: Any) -> dict[str, Any]:
    """The JSON of a checkpoint in a plan of retention or of `gc`."""
    return {
        "id": row.id,
        "name": row.name,
        "run": row.run,
        "step": row.step,
        "created": instant(row.created),
        "bytes": row.nbytes,
        **extra,
    }


def retention_data(plan: RetentionPlan, *, applied: bool) -> dict[str, Any]:
    """The JSON of what a policy keeps, thins and deletes."""
    return {
        "plan": plan.id,
        "applied": applied,
        "delete": [row_data(row) for row in plan.delete],
        "keep": [row_data(kept.row, reasons=list(kept.reasons)) for kept in plan.keep],
        "thin": [
            row_data(
                t.row,
                reasons=list(t.reasons),
                states=list(t.states),
                dropped=t.dropped,
                bytes_kept=t.bytes_kept,
            )
            for t in plan.thin
        ],
        "runs": [data_of(run) for run in plan.runs],
        "untouched": [row_data(kept.row, reasons=list(kept.reasons)) for kept in plan.untouched],
        "idle": list(plan.idle),
        "bytes_deleted": plan.bytes_deleted,
        "bytes_dropped": plan.bytes_dropped,
        "bytes_kept": plan.bytes_kept,
        "grace_seconds": int(plan.grace.total_seconds()),
    }


def data_of(value: Any) -> Any:
    """The JSON of a value of the catalog: of a dataclass its fields; `nbytes` is named `bytes`."""
    match value:
        case datetime():
            return instant(value)
        case tuple():
            return [data_of(v) for v in value]
        case _ if is_dataclass(value):
            names = _NAMES | {"id": "number"} if isinstance(value, HoldEntry) else _NAMES
            return {
                names.get(f.name, f.name): data_of(getattr(value, f.name)) for f in fields(value)
            }
    return value


def instant(at: datetime | None) -> str | None:
    """The JSON of a time: ISO 8601, in UTC."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
