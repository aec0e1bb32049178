"""Bytes of tensors as content that is read by ranges: tensors, slices, chunks of arrays, and what a rank holds."""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UnsupportedError
from ucformat.exporters.base import Span, TargetFile
from ucformat.exporters.safetensors import header_of
from ucformat.geometry.box import bounding_box, row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.jobs.bands import FileRanges
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.indexing import parse_index
from ucformat.reading.readable import check_exact
from ucformat.web.streaming import Content

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.jobs.inputs import Input
    from ucformat.reading.indexing import Index
    from ucformat.reading.rank import ReadPlan
    from ucformat.zarr_store.store import TensorArray


def etag_of(checkpoint: Checkpoint, *what: object) -> str:
    """What changes when the bytes of a part of a checkpoint do."""
    return hashlib.sha256(repr((checkpoint.id, *what)).encode()).hexdigest()[:40]


def content_of_bytes(
    data: bytes, checkpoint: Checkpoint, media_type: str = "application/json"
) -> Content:
    """Bytes that are there already."""
    array = np.frombuffer(data, np.uint8)
    etag = hashlib.sha256(data).hexdigest()[:40]
    return Content(
        len(data),
        lambda _, start, stop: array[start:stop],
        etag,
        checkpoint,
        media_type=media_type,
    )


def content_of_tensor(checkpoint: Checkpoint, info: TensorInfo, index: Index, form: str) -> Content:
    """A tensor, or a slice of one, in the order of rows.

    Args:
        form: `npy`, or `raw`: the elements alone.
    """
    check_exact(checkpoint.metadata, (info.key,), str(info.key))
    box, selection = parse_index(index, info.shape, str(info.key))
    if any(isinstance(part, slice) and part.step not in (None, 1) for part in selection):
        raise UnsupportedError(
            f"a slice of {info.key} with a step is not served",
            hint="ask for all of it, and take each n-th element there",
        )
    header = b""
    if form == "npy":
        shape = tuple(
            n for n, part in zip(box.shape, selection, strict=True) if isinstance(part, slice)
        )
        header = npy_header(info, shape)
    span = Span(info.dtype, box.size, ((info, Piece(box, 0, row_major(box.shape))),))
    parts = (*((header,) if header else ()), *((span,) if box.size else ()))
    file = FileRanges(TargetFile.of(info.name, *parts))
    return content_of_ranges(file, etag_of(checkpoint, info.key, box, form), checkpoint)


def content_of_ranges(
    file: FileRanges,
    etag: str,
    checkpoint: Checkpoint,
    media_type: str = "application/octet-stream",
) -> Content:
    """A file that is planned."""
    return Content(file.nbytes, file.read, etag, checkpoint, file.end_of_read, media_type)


def npy_header(info: TensorInfo, shape: tuple[int, ...]) -> bytes:
    """The header of a `.npy` file; dtypes that NumPy lacks are unsigned integers of the same bits."""
    dtype = numpy_dtype(info.dtype)
    is_numpys = hasattr(np, info.dtype)
    text = np.lib.format.dtype_to_descr(dtype) if is_numpys else f"<u{dtype.itemsize}"
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": text, "fortran_order": False, "shape": shape}
    )
    return out.getvalue()


def content_of_chunk(checkpoint: Checkpoint, array: TensorArray, index: tuple[int, ...]) -> Content:
    """A chunk of an array of a Zarr group, filled up with its fill value at the edges of the tensor."""
    info = array.info
    check_exact(checkpoint.metadata, (info.key,), str(info.key))

    def read(source: Input, start: int, stop: int) -> NDArray[np.uint8]:
        pieces, out = array.pieces(index, 1, start, stop)
        memory = out.view(np.uint8)
        near = bounding_box(piece.box for piece in pieces)
        if near is not None:
            box = source.within(info, near)
            source.read([(box, [(0, piece) for piece in pieces])], [memory])
        before = start % info.itemsize
        return memory[before : before + stop - start]

    return Content(
        array.nbytes, read, etag_of(checkpoint, info.key, array.chunk, index), checkpoint
    )


def content_of_plan(checkpoint: Checkpoint, plan: ReadPlan) -> Content:
    """All that a rank holds, as a safetensors file with a tensor `STATE/NAME` for each buffer.

    `tensors` of its metadata says, as JSON, which part of which buffer each tensor is.
    """
    numbers = sorted(
        range(len(plan.buffers)), key=lambda n: -numpy_dtype(plan.buffers[n].dtype).itemsize
    )
    pieces = plan.pieces()
    infos: list[tuple[str, TensorInfo]] = []
    spans: list[Span] = []
    for number in numbers:
        buffer = plan.buffers[number]
        name, state = buffer.key
        info = TensorInfo(name, state, buffer.dtype, buffer.shape)
        infos.append((f"{state}/{name}", info))
        if info.size:
            spans.append(Span(info.dtype, info.size, tuple(pieces[number])))
    about = {
        "id": checkpoint.id,
        "rank": str(plan.rank),
        "tensors": json.dumps([_placed(plan, key) for key in plan.tensors]),
    }
    file = FileRanges(TargetFile.of("part", header_of(infos, about), *spans))
    return content_of_ranges(file, etag_of(checkpoint, plan.rank, about, infos, spans), checkpoint)


def _placed(plan: ReadPlan, key: Any) -> dict[str, Any]:
    """Where a rank holds its part of a tensor."""
    local = plan.tensors[key]
    name, state = key
    out: dict[str, Any] = {
        "name": name,
        "state": state,
        "buffer": f"{state}/{local.buffer or name}",
    }
    return out if local.buffer is None else out | {"offset": local.offset, "size": local.size}
