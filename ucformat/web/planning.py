"""What the page of a plan shows: what a rank of a layout reads of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError, UsageError
from ucformat.reading.rank import amplification, plan_data
from ucformat.web.contents import Opened
from ucformat.web.library import MOST_BOXES
from ucformat.web.pictures import DRAWN, asked_layout, boxes_data, picture, stored_boxes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.reading.rank import ReadPlan
    from ucformat.web.library import Access, Library

_RANKS = 1 << 20
_FILES = 100  # of which most is read, that are listed
_TENSORS = 200  # the largest parts
_DIGITS = 9


def rank_data(
    library: Library, access: Access, ref: str, asked: Mapping[str, str]
) -> dict[str, Any]:
    """The data of the page of a plan.

    Args:
        asked: `layout`, `rank`, `state`, and `tensor` with `of`, its state: the one that is drawn,
            by default the one of which most is read.
    """
    opened = Opened(library, access, ref)
    ck = opened.readable()
    layout = asked.get("layout", "").strip()
    data: dict[str, Any] = {
        "ref": opened.ref,
        "checkpoint": opened.name,
        "layout": layout,
        "rank": asked.get("rank", "").strip() or "0",
        "state": asked.get("state", ""),
        "states": sorted({key.state for key in ck.tensors}),
        "error": None,
        "ranks": None,
        "plan": None,
    }
    if not layout:
        return data
    try:
        return data | _planned(ck, data, asked, is_limited=library.is_limited(access))
    except UcformatError as error:
        return data | {"error": library.shown_error(error, access)}


def _planned(
    ck: Checkpoint, data: Mapping[str, Any], asked: Mapping[str, str], *, is_limited: bool
) -> dict[str, Any]:
    rank = data["rank"]
    if not (rank.isascii() and rank.isdecimal() and len(rank) <= _DIGITS):
        raise UsageError(f"a rank is a number, not {rank[:40]!r}")
    layout = asked_layout(data["layout"], _RANKS)
    exact = ck.with_lossy().with_older()  # nothing is read
    plan = exact.plan(layout, int(rank), data["state"] or None, most_boxes=MOST_BOXES)
    numbers = plan_data(plan)
    files = sorted(numbers["files"].items(), key=lambda file: (-file[1], file[0]))
    parts = _parts(plan)
    largest = sorted(parts.values(), key=_nbytes, reverse=True)
    listed = [_about(info) | boxes_data(boxes, info) for info, boxes in largest[:_TENSORS]]
    wanted = (asked.get("tensor", ""), asked.get("of", ""))
    drawn = next(
        (part for key, part in parts.items() if tuple(key) == wanted),
        largest[0] if largest else None,
    )
    shown = exact.view(layout) if layout.view else exact
    return {
        "rank": int(rank),
        "ranks": layout.mesh.size,
        "has_view": bool(layout.view),
        "plan": numbers
        | {
            "amplification": amplification(plan),
            "files": [
                {"name": "" if is_limited else name, "bytes": nbytes}
                for name, nbytes in files[:_FILES]
            ],
            "other_files": max(0, len(files) - _FILES),
        },
        "tensors": listed,
        "other_tensors": max(0, len(largest) - _TENSORS),
        "drawn": None if drawn is None else _drawn(shown, int(rank), *drawn),
    }


def _parts(plan: ReadPlan) -> dict[Key, tuple[TensorInfo, list[Box]]]:
    """The boxes that a rank reads of each tensor."""
    parts: dict[Key, tuple[TensorInfo, list[Box]]] = {}
    for filled in plan.pieces():
        for info, piece in filled:
            parts.setdefault(info.key, (info, []))[1].append(piece.box)
    return parts


def _nbytes(part: tuple[TensorInfo, list[Box]]) -> int:
    info, boxes = part
    return info.itemsize * sum(box.size for box in boxes)


def _about(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "state": info.state,
        "shape": list(info.shape),
        "dtype": info.dtype,
    }


def _drawn(ck: Checkpoint, rank: int, info: TensorInfo, boxes: list[Box]) -> dict[str, Any]:
    """The picture of a tensor."""
    stored, others, _ = stored_boxes(ck, info)
    return {
        "name": info.name,
        "state": info.state,
        "shape": list(info.shape),
        "picture": picture(
            stored,
            others,
            {box: [rank] for box in boxes[:DRAWN]},
            max(0, len(boxes) - DRAWN),
        ),
    }
