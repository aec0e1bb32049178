"""What the page of a tensor shows: how it is stored, what ranks of a layout hold, and a sample of its values."""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import TensorNotFound, UcformatError, UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import TensorList, Tiles, single_extents
from ucformat.web.contents import Opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.lazy import Tensor
    from ucformat.web.library import Access, Library

_DRAWN = 2000  # chunks, and boxes of ranks
_FILES = 50  # that are listed
_RANKS = 1024
_SAMPLE = 1 << 20  # bytes that may be read
_BLOCKS = 16  # places from which a sample is taken
_BINS = 24
_SHORT = re.compile(r"(-?[0-9]{1,2}):([0-9]{1,4})", re.ASCII)


def tensor_data(
    library: Library, access: Access, ref: str, name: str, state: str, layout: str
) -> dict[str, Any]:
    """The data of the page of a tensor.

    Args:
        state: empty for `weight`, or `master` where only that is stored.
        layout: a layout as JSON, or `DIM:RANKS`; empty for none.
    """
    opened = Opened(library, access, ref)
    if opened.checkpoint is None:
        assert opened.problem is not None  # noqa: S101 - else it was opened
        raise TensorNotFound(opened.problem["message"], hint=opened.problem["hint"])
    ck = opened.checkpoint
    states = ck.states(name)
    tensor = ck[name, state] if state else ck[name] if _has_weight(states) else ck[name, states[0]]
    info = tensor.info
    chunks, others, files = _chunks(ck, info)
    data: dict[str, Any] = {
        "ref": ref if opened.entry is None else opened.entry.id,
        "checkpoint": ref if opened.entry is None else opened.entry.name,
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
        "others": others,
        "files": [] if library.is_limited(access) else files,
        "sample": sample(tensor),
    }
    pieces: list[tuple[int, Box]] = []
    if layout:
        try:
            data["ranks"], pieces = _ranks(ck, info, layout)
        except UcformatError as error:
            data["error"] = library.shown_error(error, access)
    if info.size:
        data["picture"] = _picture(info.shape, chunks, pieces)
    return data


def _has_weight(states: Iterable[str]) -> bool:
    return bool({"weight", "master"} & set(states))


def _chunks(ck: Checkpoint, info: TensorInfo) -> tuple[list[Box], int, list[str]]:
    """The boxes in which a tensor is stored, up to a number of them, how many others there are, and the first files."""
    boxes: list[Box] = []
    files: dict[str, None] = {}
    number = 0
    for extent in ck.source.extents(info.key):
        if len(files) < _FILES:
            files[extent.file] = None
        number += math.prod(extent.grid) if isinstance(extent, Tiles) else 1
        boxes += (e.box for e in islice(single_extents((extent,)), _DRAWN - len(boxes)))
    return boxes, number - len(boxes), list(files)


def _layout(text: str, ndim: int) -> Layout:
    """The layout that a client wrote."""
    short = _SHORT.fullmatch(text)
    if short is not None:
        dim, ranks = int(short[1]), int(short[2])
        if not -ndim <= dim < ndim or not 1 <= ranks <= _RANKS:
            raise UsageError(
                f"{text!r} is not a dimension of this tensor and a number of ranks",
                hint=f"there are {ndim} dimensions, and at most {_RANKS:,} ranks",
            )
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
    if document.get("view"):
        raise UsageError("a layout with a view cannot be drawn over this tensor")
    layout = Layout.parse(document)
    if layout.mesh.size > _RANKS:
        raise UsageError(f"a layout has at most {_RANKS:,} ranks here")
    return layout


def _ranks(
    ck: Checkpoint, info: TensorInfo, text: str
) -> tuple[list[dict[str, Any]], list[tuple[int, Box]]]:
    """What each rank of a layout holds, and the boxes to draw, of replicas only those of the first."""
    layout = _layout(text, len(info.shape))
    # the short form says nothing of other tensors, which may have no such dimension
    is_short = _SHORT.fullmatch(text) is not None
    bound = layout.bind(TensorList((info,)) if is_short else ck.metadata.tensor_list)
    ranks: list[dict[str, Any]] = []
    drawn: list[tuple[int, Box]] = []
    seen: set[tuple[Box, ...]] = set()
    for rank in range(bound.ranks):
        boxes = [piece.box for piece in bound.pieces(info.key, rank)]
        elements = sum(box.size for box in boxes)
        ranks.append(
            {
                "rank": rank,
                "boxes": [str(box) for box in boxes[:4]],
                "others": max(0, len(boxes) - 4),
                "elements": elements,
                "bytes": elements * info.itemsize,
            }
        )
        key = tuple(boxes)
        if key not in seen and len(drawn) < _DRAWN:
            seen.add(key)
            drawn += [(rank, box) for box in boxes[: _DRAWN - len(drawn)]]
    return ranks, drawn


def _picture(
    shape: tuple[int, ...], chunks: Iterable[Box], pieces: Iterable[tuple[int, Box]]
) -> dict[str, Any]:
    """The first index of all dims but two, as rows and columns; of one dim it is the columns."""
    rows, columns = ((1, 1, *shape)[-2:]) if shape else (1, 1)

    def flat(box: Box) -> dict[str, int] | None:
        if any(box.start[:-2]) or not box.size:
            return None
        start, size = (0, 0, *box.start)[-2:], (1, 1, *box.shape)[-2:]
        return {"row": start[0], "column": start[1], "rows": size[0], "columns": size[1]}

    return {
        "rows": rows,
        "columns": columns,
        "chunks": [place for box in chunks if (place := flat(box)) is not None],
        "pieces": [
            {"rank": rank} | place for rank, box in pieces if (place := flat(box)) is not None
        ],
    }


def sample(tensor: Tensor) -> dict[str, Any]:
    """Statistics of some elements, of which at most 1 MiB is read, and how many they are."""
    boxes = list(_sampled(tensor.info))
    parts = [np.asarray(tensor.read_box(box, None)).reshape(-1) for box in boxes]
    values = np.concatenate(parts) if parts else np.empty(0)
    data: dict[str, Any] = {
        "elements": int(values.size),
        "bytes": int(values.size) * tensor.info.itemsize,
        "of": tensor.info.size,
        "boxes": [str(box) for box in boxes],
        "numbers": None,
    }
    kind = tensor.info.dtype
    if values.size and (kind == "bool" or re.match(r"u?int|b?float", kind)):
        try:
            numbers = values.astype("f8")
        except (TypeError, ValueError):  # of a dtype whose bits alone are known
            return data
        data["numbers"] = _statistics(numbers)
    return data


def _statistics(numbers: np.ndarray[Any, Any]) -> dict[str, Any]:
    finite = numbers[np.isfinite(numbers)]
    statistics: dict[str, Any] = {
        "nan": int(np.isnan(numbers).sum()),
        "infinite": int(np.isinf(numbers).sum()),
        "zero": int((numbers == 0).sum()),
    }
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):
            statistics |= {
                "minimum": float(finite.min()),
                "maximum": float(finite.max()),
                "mean": float(finite.mean()),
                "deviation": float(finite.std()),
                "rms": float(np.sqrt(np.mean(finite**2))),
            }
        low, high = statistics["minimum"], statistics["maximum"]
        if math.isfinite(high - low):
            counts, _ = np.histogram(
                finite, bins=_BINS, range=(low, high if high > low else low + 1)
            )
            statistics["histogram"] = counts.tolist()
    return statistics


def _sampled(info: TensorInfo) -> Iterator[Box]:
    """Boxes of at most 1 MiB together, spread over a tensor; all of a small one."""
    if not info.size:
        return
    if info.nbytes <= _SAMPLE:
        yield Box.whole(info.shape)
        return
    # a box is one index of the first dims, and some of the next
    limit = _SAMPLE // _BLOCKS // info.itemsize
    inner, dim = 1, len(info.shape)
    while dim and inner * info.shape[dim - 1] <= limit:
        dim -= 1
        inner *= info.shape[dim]
    count = max(1, min(info.shape[dim - 1], limit // inner))  # of the dim before
    lead = info.shape[: dim - 1]
    places = math.prod(lead) * -(-info.shape[dim - 1] // count)
    for k in range(min(_BLOCKS, places)):
        *at, step = np.unravel_index(
            k * places // min(_BLOCKS, places), (*lead, -(-info.shape[dim - 1] // count))
        )
        start = min(int(step) * count, info.shape[dim - 1] - count)
        yield Box(
            (*(int(i) for i in at), start, *(0,) * (len(info.shape) - dim)),
            (*(1,) * len(lead), count, *info.shape[dim:]),
        )
