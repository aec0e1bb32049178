"""NumPy on the receiving end: fill ranks' buffers by pieces, and gather whole tensors back from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ucformat.geometry.tensor import Key, Piece, TensorInfo, TensorList

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.geometry.bound import BoundLayout
    from ucformat.geometry.box import Box

Arrays = dict[tuple[str, str], np.ndarray]

FILLER = -1  # what no tensor holds: padding


def window(array: np.ndarray, piece: Piece) -> np.ndarray:
    """The piece's region of a flat array, as a view."""
    strides = tuple(s * array.itemsize for s in piece.strides)
    return as_strided(array[piece.offset :], piece.box.shape, strides)


def inside(array: np.ndarray, box: Box) -> np.ndarray:
    """The box of an array, as a view: even of a scalar, thanks to `...`."""
    index: tuple[Any, ...] = (..., *map(slice, box.start, box.stop))
    view: np.ndarray = array[index]
    return view


def numbered(tensor_list: TensorList) -> dict[Key, np.ndarray]:
    """Tensors in which no two elements are equal, not even of different tensors."""
    out, at = {}, 0
    for info in tensor_list.tensors:
        out[info.key] = np.arange(at, at + info.size, dtype=np.int64).reshape(info.shape)
        at += info.size
    return out


def empty(bound: BoundLayout, rank: int) -> Arrays:
    out: Arrays = {key: np.full(b.size, FILLER, np.int64) for key, b in bound.buffers(rank).items()}
    for info in bound.tensor_list.tensors:
        local = bound.local(info.key, rank)
        if local is not None and local.buffer is None:
            out[info.key] = np.full(math.prod(local.shape), FILLER, np.int64)
    return out


def buffer_of(arrays: Arrays, key: Key, piece: Piece) -> np.ndarray:
    return arrays[key if piece.buffer is None else (piece.buffer, key.state)]


def scatter(bound: BoundLayout, wholes: Mapping[Key, np.ndarray]) -> list[Arrays]:
    """Each rank's buffers, filled from whole tensors; an element that is written twice is an error."""
    ranks = []
    for rank in range(bound.ranks):
        arrays = empty(bound, rank)
        for info in bound.tensor_list.tensors:
            for piece in bound.pieces(info.key, rank):
                to = window(buffer_of(arrays, info.key, piece), piece)
                assert (to == FILLER).all()
                to[...] = inside(wholes[info.key], piece.box)
        ranks.append(arrays)
    return ranks


def gather(bound: BoundLayout, ranks: list[Arrays]) -> dict[Key, np.ndarray]:
    """Whole tensors from the ranks' buffers; where several ranks hold an element they must agree."""
    out = {}
    for info in bound.tensor_list.tensors:
        whole = np.full(info.shape, FILLER, np.int64)
        for rank, arrays in enumerate(ranks):
            for piece in bound.pieces(info.key, rank):
                to, values = (
                    inside(whole, piece.box),
                    window(buffer_of(arrays, info.key, piece), piece),
                )
                assert ((to == FILLER) | (to == values)).all()
                to[...] = values
        out[info.key] = whole
    return out


def tensors(
    *shapes: tuple[int, ...], states: tuple[str, ...] = ("weight",), group: int = 0
) -> TensorList:
    """A tensor list of tensors t0, t1, … of these shapes, each in every state."""
    infos = [
        TensorInfo(f"t{i}", state, "float32", s) for i, s in enumerate(shapes) for state in states
    ]
    return TensorList(tuple(infos), {f"t{i}": group for i in range(len(shapes))})
