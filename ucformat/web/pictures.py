"""What is drawn of a tensor: the boxes in which it is stored, and over them those that ranks of a layout hold."""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import Tiles, single_extents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import TensorInfo

#: Boxes of a kind that are drawn.
DRAWN = 2000
_FILES = 50  # that are listed
_SPELLED = 4  # boxes of a tensor
_SHORT = re.compile(r"(-?[0-9]{1,2}):([0-9]{1,7})", re.ASCII)


def asked_layout(text: str, most: int) -> Layout:
    """The layout that a client wrote: as JSON, or as `DIM:RANKS`, one dim of all tensors.

    Args:
        most: how many ranks it may have.
    """
    short = _SHORT.fullmatch(text)
    if short is not None:
        dim, ranks = int(short[1]), int(short[2])
        if not 1 <= ranks <= most:
            raise UsageError(f"a layout has 1 to {most:,} ranks here, not {ranks:,}")
        return Layout({"tp": ranks}, [{"match": "*", "place": [{"shard": dim, "over": "tp"}]}])
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(
            "this layout is neither JSON nor DIM:RANKS",
            hint="write 0:8 for the first dimension in 8 ranks, or a layout file as JSON",
        ) from None
    if not isinstance(document, dict):
        raise UsageError("a layout is a JSON object", hint="see docs/layout.md")
    layout = Layout.parse(document)
    if layout.mesh.size > most:
        raise UsageError(f"a layout has at most {most:,} ranks here")
    return layout


def is_short(text: str) -> bool:
    """Whether a layout says nothing but a dim, which some tensors may not have."""
    return _SHORT.fullmatch(text) is not None


def stored_boxes(ck: Checkpoint, info: TensorInfo) -> tuple[list[Box], int, list[str]]:
    """The boxes in which a tensor is stored, up to a number of them, how many others there are, and the first files."""
    boxes: list[Box] = []
    files: dict[str, None] = {}
    number = 0
    for extent in ck.source.extents(info.key):
        if len(files) < _FILES:
            files[extent.file] = None
        number += math.prod(extent.grid) if isinstance(extent, Tiles) else 1
        boxes += (e.box for e in islice(single_extents((extent,)), DRAWN - len(boxes)))
    return boxes, number - len(boxes), list(files)


def boxes_data(boxes: Sequence[Box], info: TensorInfo) -> dict[str, Any]:
    """Boxes of a tensor: the first of them, how many others there are, and how much all have."""
    elements = sum(box.size for box in boxes)
    return {
        "boxes": [str(box) for box in boxes[:_SPELLED]],
        "others": max(0, len(boxes) - _SPELLED),
        "elements": elements,
        "bytes": elements * info.itemsize,
    }


def picture(
    stored: Sequence[Box], others: int, ranks: Mapping[Box, Sequence[int]], undrawn: int = 0
) -> dict[str, Any]:
    """What a page draws of a tensor; of a grid that is too fine, only how many boxes it has.

    Args:
        undrawn: how many boxes ranks hold besides.
    """
    return {
        "stored": len(stored) + others,
        "chunks": [] if others else [_box(box) for box in stored],
        "pieces": [{"ranks": list(some), **_box(box)} for box, some in ranks.items()],
        "undrawn": undrawn,
    }


def _box(box: Box) -> dict[str, list[int]]:
    return {"start": list(box.start), "shape": list(box.shape)}
