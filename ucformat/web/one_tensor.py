"""What the page of a tensor shows: how it is stored, what ranks of a layout hold, and samples of its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError, UsageError
from ucformat.geometry.tensor import TensorList
from ucformat.web.contents import Opened
from ucformat.web.measuring import norms_along_run
from ucformat.web.pictures import (
    DRAWN,
    asked_layout,
    boxes_data,
    is_short,
    picture,
    stored_boxes,
)
from ucformat.web.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.web.library import Access, Library

_RANKS = 1024
_BOXES = 1 << 16  # that all ranks may hold


def tensor_data(
    library: Library, access: Access, ref: str, name: str, asked: Mapping[str, str]
) -> dict[str, Any]:
    """The data of the page of a tensor.

    Args:
        asked: `state`, empty for `weight`, or `master` where only that is stored; `layout`, a
            layout as JSON, or `DIM:RANKS`, empty for none; and `along`, not empty for its norms
            along the run.
    """
    state, layout = asked.get("state", ""), asked.get("layout", "").strip()
    opened = Opened(library, access, ref)
    ck = opened.readable()
    states = ck.states(name)
    tensor = ck[name, state] if state else ck[name] if _has_weight(states) else ck[name, states[0]]
    info = tensor.info
    stored, others, files = stored_boxes(ck, info)
    data: dict[str, Any] = {
        "ref": opened.ref,
        "checkpoint": opened.name,
        "name": info.name,
        "state": info.state,
        "states": states,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "elements": info.size,
        "bytes": info.nbytes,
        "fingerprint": tensor.recorded_fingerprint,
        "layout": layout,
        "error": None,
        "ranks": [],
        "picture": None,
        "files": [] if library.is_limited(access) else files,
        "sample": sample(tensor),
        "run": None if opened.entry is None else opened.entry.run,
        "along": None,
    }
    if asked.get("along") and opened.entry is not None and opened.entry.run is not None:
        data["along"] = norms_along_run(library, access, opened.entry, info.key)
    by_box: dict[Box, list[int]] = {}
    undrawn = 0
    if layout:
        try:
            data["ranks"], by_box, undrawn = _ranks(ck, info, layout)
        except UcformatError as error:
            data["error"] = library.shown_error(error, access)
    if info.size:
        data["picture"] = picture(stored, others, by_box, undrawn)
    return data


def _has_weight(states: Iterable[str]) -> bool:
    return bool({"weight", "master"} & set(states))


def _ranks(
    ck: Checkpoint, info: TensorInfo, text: str
) -> tuple[list[dict[str, Any]], dict[Box, list[int]], int]:
    """What each rank of a layout holds, the boxes to draw, each with its ranks, and how many others there are."""
    layout = asked_layout(text, _RANKS)
    if layout.view:
        raise UsageError("a layout with a view cannot be drawn over this tensor")
    # the short form says nothing of other tensors, which may have no such dimension
    bound = layout.bind(TensorList((info,)) if is_short(text) else ck.metadata.tensor_list)
    ranks: list[dict[str, Any]] = []
    drawn: dict[Box, list[int]] = {}
    others: set[Box] = set()
    number = 0
    for rank in range(bound.ranks):
        boxes = [piece.box for piece in bound.pieces(info.key, rank)]
        number += len(boxes)
        if number > _BOXES:
            raise UsageError(f"the ranks hold more than {_BOXES:,} boxes of this tensor")
        ranks.append({"rank": rank, **boxes_data(boxes, info)})
        for box in boxes:
            if box in drawn or len(drawn) < DRAWN:
                drawn.setdefault(box, []).append(rank)
            else:
                others.add(box)
    return ranks, drawn, len(others)
