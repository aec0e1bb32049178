"""GGUF files, read in place: plain tensors, and the blocks of quantized ones as rows of bytes.

Blocks are not dequantized: llama.cpp's kernels differ in the last bit, and nothing leads back. They
have a state of their own, by the type, so that nothing takes them for weights. The header is a
tensor of bytes, too, with which an export makes the same file again.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from ucformat.engines.gguf.header import read_header
from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key
from ucformat.reading.readable import CheckpointMetadata
from ucformat.reading.values import to_json
from ucformat.schema import ITEMSIZE
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.engines.gguf.header import Header
    from ucformat.storage.base import Store

HEADER, HEADER_STATE = "gguf.header", "header"
VALUES = "gguf"
_SPLIT, _SPLITS = "split.no", "split.count"


class OpenGguf(IndexedSource):
    """Opened GGUF files of one model; `part` as in `OpenSource`."""

    kind = "gguf"

    def __init__(
        self,
        store: Store,
        files: Sequence[str],
        assets: Sequence[str] = (),
        folder: str = "",
        *,
        part: bool = False,
    ) -> None:
        self.store, self.contents = store, TensorIndex()
        sizes = {file: store.info(file).size for file in files}

        def read(file: str) -> Header:
            return read_header(lambda n: store.read(file, 0, n), sizes[file], file)

        headers = dict(zip(files, map_io(read, files), strict=True))
        self.part = _check_splits(headers, part=part)
        written: dict[str, Any] = {}
        for number, (file, header) in enumerate(headers.items()):
            name = HEADER if not number else f"{HEADER}.{number}"
            written[name] = {"file": file, "nbytes": sizes[file]}
            self._add(Key(name, HEADER_STATE), "uint8", (header.start,), file, 0)
            for entry in header.entries:
                key = Key(entry.name, entry.state)
                if entry.dtype:
                    self._add(key, entry.dtype, entry.shape, file, entry.start)
                else:
                    self.contents.refuse(
                        key, f"has the type {entry.type} of GGUF, which ucformat does not know"
                    )
        first = next(iter(headers.values()))
        values = {k: v for k, v in first.values.items() if not isinstance(v, dict)}
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            objects={VALUES: {"files": written}, "model_config": to_json(values)},
            assets=tuple(assets),
            engine={"name": "gguf", "version": str(first.version)},
            files=tuple(files),
            folder=folder,
        )

    def _add(self, key: Key, dtype: str, shape: tuple[int, ...], file: str, start: int) -> None:
        extent = Extent(Box.whole(shape), file, start, row_major(shape, ITEMSIZE[dtype]))

        def extents(_: Box | None) -> Iterator[Extent]:
            if extent.box.size:
                yield extent

        self.contents.add(*key, dtype, shape, extents)


def _check_splits(headers: dict[str, Header], *, part: bool) -> str | None:
    """Check that files are all those of one model; returns what they are a part of, empty if of nothing."""
    counts = [_split_value(header, _SPLITS, file) or 1 for file, header in headers.items()]
    numbers = [_split_value(header, _SPLIT, file) for file, header in headers.items()]
    total = counts[0]
    if {*counts} != {total} or len({*numbers}) < len(numbers) or max(numbers) >= total:
        raise IntegrityError(
            f"{', '.join(headers)} are not the splits of one model: they say that there are "
            f"{sorted({*counts})}, and have the numbers {numbers}",
            hint="files of several models are mixed in one folder",
        )
    if len(headers) == total:
        return ""
    if part or len(headers) == 1:
        return f"{len(headers)} of the {total} splits of a model"
    raise IntegrityError(
        f"{', '.join(headers)} say that there are {total} splits",
        hint="copy all splits of the model, and no other's",
    )


def _split_value(header: Header, key: str, file: str) -> int:
    """A number about the splits of a model; 0 in a file that is not one of several."""
    value = header.values.get(key, 0)
    if type(value) is not int or value < 0:
        raise IntegrityError(f"{file} has the {key} {reprlib.repr(value)}, which is no number")
    return value
