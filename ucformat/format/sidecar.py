"""The sidecar: extents of a packed checkpoint as columns of one safetensors file (docs/spec.md, "Sidecar")."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ucformat.errors import IntegrityError, Refused
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Block, Extent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["decode", "encode"]

_COLUMNS = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c", "start", "shape", "strides")
_NO_BLOCK = -1
_FOLLOWS = -1  # of crc32c: the checksum is stored behind the block


def encode(extents: Sequence[Iterable[Extent]]) -> bytes:
    """The sidecar of these extents; the first index is the tensor's number in the manifest."""
    files: dict[str, int] = {}
    rows, dims = [], []
    for number, of_tensor in enumerate(extents):
        for e in of_tensor:
            block = (_NO_BLOCK, 0, 0)
            if e.block is not None:
                crc = _FOLLOWS if e.block.crc32c is None else e.block.crc32c
                block = (e.block.offset, e.block.nbytes, crc)
            rows.append((number, files.setdefault(e.file, len(files)), e.offset, *block))
            dims.append(np.array((e.box.start, e.box.shape, e.strides), "<i8").reshape(3, -1))
    table = np.array(rows, "<i8").reshape(-1, 6)
    flat = np.concatenate(dims, axis=1) if dims else np.empty((3, 0), "<i8")
    columns = [*table.T, *flat]
    arrays = {name: np.ascontiguousarray(column) for name, column in zip(_COLUMNS, columns, strict=True)}
    data: bytes = save(arrays, {"format": "ucformat-extents", "version": "1", "files": json.dumps(list(files))})
    return data


def decode(data: bytes, ndims: Sequence[int], where: str) -> list[tuple[Extent, ...]]:
    """The extents of each tensor, whose numbers of dims are `ndims`; `where` names the sidecar in errors.

    Raises:
        IntegrityError: the columns do not fit each other or the tensors.
        Refused: an extent lies outside the checkpoint's folder.
    """
    arrays, files = _parse(data, where)
    tensor, offsets = arrays["tensor"], [arrays[c] for c in _COLUMNS[1:6]]
    n = len(tensor)
    if any(len(c) != n for c in offsets) or (n and not (tensor.min() >= 0 and tensor.max() < len(ndims))):
        raise IntegrityError(f"{where}: its columns do not fit the manifest", hint="restore it from another copy")
    ends = np.cumsum(np.asarray(ndims, np.int64)[tensor]) if n else np.zeros(0, np.int64)
    total = int(ends[-1]) if n else 0
    if any(len(arrays[c]) != total for c in _COLUMNS[6:]):
        raise IntegrityError(f"{where}: its boxes do not fit the manifest", hint="restore it from another copy")
    out: list[list[Extent]] = [[] for _ in ndims]
    columns = [c.tolist() for c in (tensor, *offsets, ends)]
    start, shape, strides = (tuple(arrays[c].tolist()) for c in _COLUMNS[6:])
    for t, file, offset, at, nbytes, crc, end in zip(*columns, strict=True):
        if not 0 <= file < len(files) or offset < 0 or nbytes < 0:
            raise IntegrityError(f"{where}: an extent of tensor {t} is impossible")
        dims = slice(end - ndims[t], end)
        block = None if at == _NO_BLOCK else Block(at, nbytes, None if crc == _FOLLOWS else crc)
        out[t].append(Extent(Box(start[dims], shape[dims]), files[file], offset, strides[dims], block))
    return [tuple(e) for e in out]


def _parse(data: bytes, where: str) -> tuple[dict[str, np.ndarray], list[str]]:
    try:
        arrays = load(data)
        size = int.from_bytes(data[:8], "little")
        meta = json.loads(data[8 : 8 + size])["__metadata__"]
        files = json.loads(meta["files"])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{where} is not a ucformat sidecar: {error}") from None
    if meta.get("format") != "ucformat-extents" or meta.get("version") != "1" or not _are_columns(arrays):
        raise IntegrityError(f"{where} is not a ucformat sidecar of version 1")
    for file in files:
        if not isinstance(file, str) or "://" in file or file.startswith("/"):
            raise Refused(
                f"{where} points to {file!r}, outside its checkpoint",
                hint="only files below the checkpoint's own folder are read",
            )
    return arrays, files


def _are_columns(arrays: dict[str, np.ndarray]) -> bool:
    return set(arrays) == set(_COLUMNS) and all(a.ndim == 1 and a.dtype == np.dtype("<i8") for a in arrays.values())
