"""What the pages of a run, and of two checkpoints beside each other, show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import change_data, instant, tensor_data
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import UsageError
from ucformat.web.library import NoRepository
from ucformat.web.measuring import distances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.catalog.entries import Entry
    from ucformat.web.library import Access, Library

_STEPS = 100  # the newest of a run that are listed
_POINTS = 250  # of a curve
_PLOTS = 24  # metrics that are drawn
_TENSORS = 200  # that are listed of each kind of difference
_VALUES = 300


def run_data(library: Library, access: Access, name: str) -> dict[str, Any]:
    """The data of the page of a run."""
    entries = library.entries(access, f"run = {quoted(name)}", limit=_STEPS + 1)
    if not entries:
        raise NoRepository(f"there is no run {name!r}")
    assert library.catalog is not None  # noqa: S101 - it has the entries
    curves = library.catalog.curves(name, library.within(access), most=_POINTS, drawn=_PLOTS)
    more = len(entries) > _STEPS
    shown = sorted(entries[:_STEPS], key=lambda e: (-1 if e.step is None else e.step, e.created))
    return {
        "name": name,
        "more": more,
        "steps": [
            {
                "id": e.id,
                "name": e.name,
                "step": e.step,
                "created": instant(e.created),
                "bytes": e.nbytes,
                "tensors": e.tensors,
                "tags": list(e.tags),
                "aliases": list(e.aliases),
            }
            for e in shown
        ],
        "metrics": {metric: [list(p) for p in points] for metric, points in curves.points.items()},
        "every": curves.every,
        "undrawn": curves.others,
        "unnamed": curves.unnamed,
        "bytes": sum(e.nbytes for e in shown),
    }


def run_of(library: Library, access: Access, checkpoint: str) -> str:
    """The run of a checkpoint, for names that are too long for an address."""
    entry = library.entry(checkpoint, access)
    if entry.run is None:
        raise NoRepository(f"{entry.id} is of no run")
    return entry.run


def compare_data(
    library: Library, access: Access, refs: Sequence[str], *, with_values: bool
) -> dict[str, Any]:
    """The data of the page of two checkpoints.

    Args:
        with_values: whether to measure how far their tensors are apart.

    Raises:
        UsageError: there are not two.
    """
    if len(refs) != 2:
        raise UsageError(
            f"two checkpoints are compared, not {len(refs)}", hint="select two in the list"
        )
    a, b = (library.entry(ref, access) for ref in refs)
    assert library.catalog is not None  # noqa: S101 - it has both
    diff = library.catalog.diff(a.id, b.id)
    changed = [c for c in diff.tensors.changed if c.aspects != ("digest",)]
    return {
        "values": _values(library, access, a, b) if with_values else None,
        "a": _side(library.shown(diff.a, access)),
        "b": _side(library.shown(diff.b, access)),
        "equal": diff.equal,
        **{
            part: [change_data(c) for c in getattr(diff, part)[:_VALUES]]
            for part in ("config", "topology", "producer", "metrics")
        },
        "others": {
            part: max(0, len(getattr(diff, part)) - _VALUES)
            for part in ("config", "topology", "producer", "metrics")
        },
        "tensors": {
            "added": [tensor_data(t) for t in diff.tensors.added[:_TENSORS]],
            "removed": [tensor_data(t) for t in diff.tensors.removed[:_TENSORS]],
            "changed": [
                {
                    "name": c.name,
                    "state": c.state,
                    "aspects": list(c.aspects),
                    "a": tensor_data(c.a),
                    "b": tensor_data(c.b),
                }
                for c in changed[:_TENSORS]
            ],
            "numbers": {
                "added": len(diff.tensors.added),
                "removed": len(diff.tensors.removed),
                "of other shape or dtype": len(changed),
                "of other values": len(diff.tensors.changed) - len(changed),
                "the same": diff.tensors.same,
                "without digests to compare": diff.tensors.unknown,
            },
        },
    }


def _values(library: Library, access: Access, a: Entry, b: Entry) -> dict[str, Any]:
    """How far the tensors of two checkpoints are apart."""
    left, right = (library.open(entry).checkpoint for entry in (a, b))
    return distances(left, right, lambda error: str(library.shown_error(error, access)["message"]))


def _side(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "name": entry.name, "step": entry.step, "run": entry.run}
