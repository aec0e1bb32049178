"""safetensors checkpoints, read in place: one file, or the shards of one model.

A file consists of the length N of the header as a little-endian 8-byte integer; N bytes of JSON, an
object that begins with `{` and may be padded with spaces; and the bytes of the tensors. An entry of
the object is a tensor: `{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}`, with offsets
from the end of the header to row-major little-endian elements; or `__metadata__`, an object with
text values. Tensors leave no gaps and fill the file to its end. These rules, and the limit of 100
MB on N, are those of the safetensors library.

Elements of less than a byte (F4, F6) are packed, and the header counts them one by one. In a tensor
of ours an element is what PyTorch has as one, a pair of F4, or of F6, for which it has none, a
byte.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.reading.readable import PART_OF, CheckpointMetadata
from ucformat.reading.stand_ins import unknown_dtype
from ucformat.reading.values import to_json
from ucformat.schema import ITEMSIZE, SAFETENSORS_DTYPES, SAFETENSORS_PACKED
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.parts import part_by_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.sources.model_files import ModelFiles
    from ucformat.storage.base import Store

_MAX_HEADER = 100_000_000
_FIRST = 16 << 10  # bytes of the first read: most headers of small models fit
_MAX_NUMBER = 1 << 63
_HINT = "the file is truncated or damaged, or is not a safetensors file; copy it again from where it was saved"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors in order, where each begins in the file, and `__metadata__`."""

    file: str
    tensors: dict[str, TensorInfo]
    starts: dict[str, int]  # the first byte of each tensor in the file
    metadata: dict[str, str]
    unreadable: dict[str, str]  # of tensors that cannot be read: the reason

    def extents(self, name: str, _within: Box | None = None) -> Iterator[Extent]:
        """Find the extent of a tensor; none if it has no elements."""
        info = self.tensors[name]
        if info.nbytes:
            strides = row_major(info.shape, ITEMSIZE[info.dtype])
            yield Extent(Box.whole(info.shape), self.file, self.starts[name], strides)


def read_header(store: Store, key: str) -> Header:
    """Read the header of a file, in one or two requests."""
    size = store.info(key).size
    head = store.read(key, 0, min(size, _FIRST))
    if size < 8:
        raise IntegrityError(f"{key} has {size} bytes, too few for a safetensors file", hint=_HINT)
    length = int.from_bytes(head[:8], "little")
    if length > _MAX_HEADER:
        raise IntegrityError(
            f"{key}: its header would have {length:,} bytes, more than {_MAX_HEADER:,}", hint=_HINT
        )
    if 8 + length > size:
        raise IntegrityError(
            f"{key}: its header would have {length:,} bytes, but the file has {size:,}", hint=_HINT
        )
    if 8 + length > len(head):
        head += store.read(key, len(head), 8 + length - len(head))
    return parse_header(head[8 : 8 + length], size, key)


def parse_header(data: bytes, size: int, file: str) -> Header:
    """Parse a header and check that its tensors fill the file."""
    if not data.startswith(b"{"):
        raise _damaged(file, f"begins with {data[:8]!r} and not with {{")
    try:
        entries = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"cannot be read ({str(error)[:200]})") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(file, "has a __metadata__ with values that are not text")
    start = 8 + len(data)
    header = Header(file, {}, {}, metadata, {})
    ranges: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        tensor, begin, end = _tensor(name, entry, file)
        if isinstance(tensor, TensorInfo):
            header.tensors[name], header.starts[name] = tensor, start + begin
        else:
            header.unreadable[name] = tensor
        ranges[name] = (start + begin, start + end)
    _check_tiling(file, ranges, start, size)
    return header


def _tensor(name: str, entry: Any, file: str) -> tuple[TensorInfo | str, int, int]:
    """Parse one entry: the tensor or why it cannot be read, and its range of bytes after the header."""
    shown = reprlib.repr(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"has an entry {shown} without exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise _damaged(file, f"gives the tensor {shown} the data type {reprlib.repr(dtype)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _damaged(
            file,
            f"gives the tensor {shown} the shape {reprlib.repr(shape)} at {reprlib.repr(offsets)}",
        )
    begin, end = offsets
    if dtype not in SAFETENSORS_DTYPES and end >= begin:
        return unknown_dtype(dtype), begin, end
    values, elements = SAFETENSORS_PACKED.get(SAFETENSORS_DTYPES.get(dtype, ""), (1, 1))
    total = math.prod(shape) * elements
    nbytes = (
        total * ITEMSIZE[SAFETENSORS_DTYPES[dtype]] // values if dtype in SAFETENSORS_DTYPES else 0
    )
    if end - begin != nbytes or total % values:
        raise _damaged(
            file, f"gives the tensor {shown} {end - begin} bytes, but {dtype} of shape {reprlib.repr(shape)} takes "
            f"{reprlib.repr(nbytes)}"
        )  # fmt: skip
    if values > 1 and (not shape or shape[-1] % values):
        return f"is {dtype} of shape {shape}, whose rows do not begin at whole bytes", begin, end
    if values > 1:
        shape = [*shape[:-1], shape[-1] * elements // values]
    return TensorInfo(name, "weight", SAFETENSORS_DTYPES[dtype], tuple(shape)), begin, end


def _check_tiling(file: str, ranges: dict[str, tuple[int, int]], start: int, size: int) -> None:
    """Check that the tensors are contiguous from the end of the header to the end of the file."""
    expected, last = start, ""
    # By begin and end: an empty tensor precedes the one that begins at the same byte.
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != expected:
            problem = "overlaps" if begin < expected else "leaves a gap after"
            before = f"the tensor {reprlib.repr(last)}" if last else "the header"
            raise _damaged(
                file, f"puts the tensor {reprlib.repr(name)} where it {problem} {before}"
            )
        expected, last = end, name
    if expected != size:
        raise IntegrityError(
            f"{file} should have {expected:,} bytes by its header, but has {size:,}",
            hint="the copy or the save did not finish; copy the file again from where it was saved"
            if expected > size
            else _HINT,
        )


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(type(n) is int and 0 <= n < _MAX_NUMBER for n in value)
        and len(value) <= 64
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {reprlib.repr(twice)} is used twice")
    return entries


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _damaged(file: str, problem: str) -> IntegrityError:
    return IntegrityError(f"{file}: its header {problem}", hint=_HINT)


#: In `__metadata__` of a shard, if PyTorch DCP sharded the tensors across files.
SHARDING_INFO = "DCP_SHARDING_INFO"


class OpenSafetensors(IndexedSource):
    """An opened checkpoint of safetensors files; `part` as in `OpenSource`."""

    kind = "safetensors"

    def __init__(self, model: ModelFiles) -> None:
        self.store, self.contents = model.store, TensorIndex()
        opened = model.open(
            lambda key: read_header(model.store, key), lambda h: [*h.tensors, *h.unreadable]
        )
        headers = opened.opened
        for header in headers:
            _add(header, self.contents)
        objects = _metadata(headers)
        self.part = next((h.metadata[PART_OF] for h in headers if PART_OF in h.metadata), None)
        self.part = self.part or opened.part
        if self.part is None and len(headers) == 1:
            self.part = part_by_shapes(
                model.store, {name: info.shape for name, info in headers[0].tensors.items()}
            )
        if opened.metadata:
            objects["index"] = to_json(opened.metadata)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            aliases=_aliases(headers, self.contents),
            objects=objects,
            assets=tuple(model.assets),
            engine={"name": "safetensors"},
            files=opened.files,
            folder=model.folder,
            unreadable=self.contents.unreadable,
        )


def _add(header: Header, contents: TensorIndex) -> None:
    """Add the tensors of a file."""
    if SHARDING_INFO in header.metadata:
        raise UnsupportedError(
            f"{header.file} was saved by PyTorch's HuggingFaceStorageWriter, which shards "
            "tensors across files",
            hint=(
                "open the folder that it wrote as a DCP checkpoint, or consolidate it with PyTorch"
            ),
        )
    for name in (*header.tensors, *header.unreadable):
        try:
            if name in header.unreadable:
                contents.refuse(Key(name, "weight"), header.unreadable[name])
            else:
                contents.put(header.tensors[name], partial(header.extents, name))
        except IntegrityError as error:
            raise IntegrityError(
                f"{name!r} is in {header.file} and in another file of the checkpoint",
                hint=(
                    "files of different saves are mixed in one folder; move those that do not "
                    "belong elsewhere"
                ),
            ) from error


def _aliases(headers: Sequence[Header], contents: TensorIndex) -> dict[str, str]:
    """Names of tied tensors that `safetensors.torch.save_model` removed and recorded in the metadata."""
    names = {key.name for key in contents.infos}
    recorded = {k: v for header in headers for k, v in header.metadata.items()}
    return {alias: name for alias, name in recorded.items() if name in names and alias not in names}


def _metadata(headers: Sequence[Header]) -> dict[str, Any]:
    """`__metadata__` as an object: one if it is equal in all files, otherwise by file."""
    first = headers[0].metadata
    if all(h.metadata == first for h in headers):
        return {"metadata": to_json(first)} if first else {}
    return {"metadata": {h.file: to_json(h.metadata) for h in headers}}
