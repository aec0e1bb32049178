"""The source for what Accelerate has offloaded to a disk: a file of bytes for each tensor, and `index.json`.

`from_pretrained(…, device_map="auto", offload_folder=…)`, `disk_offload` and `offload_state_dict`
write it. It may be only a part of a model, whose other tensors stayed on devices, and no file tells.
"""

from __future__ import annotations

import reprlib
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key
from ucformat.reading.readable import CheckpointMetadata
from ucformat.reading.stand_ins import unknown_dtype
from ucformat.schema import ITEMSIZE
from ucformat.sources.base import Source
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.model_files import find_assets, read_json, root_files
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.storage.base import Info, Store

__all__ = ["Offload"]

_INDEX, _SUFFIX = "index.json", ".dat"
_MAX_DIMS, _MAX_SIZE = 64, 1 << 48
_PART = (
    "what was offloaded to a disk of a model, and no file tells whether tensors stayed elsewhere"
)


class Offload(Source):
    """Recognises and opens the offload folders of Accelerate."""

    kind = "offload"
    title = "Accelerate's offload folder"
    before = ("torch_save",)

    def is_marker(self, name: str) -> bool:  # noqa: ARG002 - of none
        """No file marks it: it is a copy of tensors for one process, and no checkpoint to register."""
        return False

    def find(self, store: Store) -> bool:
        """Whether the folder has an index, and files of tensors."""
        names = root_files(store)
        return _INDEX in names and any(name.endswith(_SUFFIX) for name in names)

    def open(self, store: Store) -> OpenOffload:
        """Open the folder by its index."""
        return OpenOffload(store)


class OpenOffload(IndexedSource):
    """An opened offload folder."""

    kind = "offload"
    part = _PART

    def __init__(self, store: Store) -> None:
        self.store, self.contents = store, TensorIndex()
        infos = root_files(store)
        index = read_json(store, _INDEX)
        if not isinstance(index, dict) or not all(isinstance(v, dict) for v in index.values()):
            raise IntegrityError(f"{store.url}/{_INDEX} is not an index of offloaded tensors")
        files = [_INDEX]
        for name, entry in index.items():
            if elsewhere := entry.get("safetensors_file"):
                self.contents.refuse(
                    Key(name, "weight"),
                    f"was not copied here: it is in {reprlib.repr(elsewhere)}, which can be opened itself",
                )
                continue
            self._add(name, entry, infos)
            files.append(name + _SUFFIX)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            assets=find_assets(infos.values(), files),
            engine={"name": "accelerate"},
            files=tuple(files),
        )

    def _add(self, name: str, entry: Mapping[str, Any], infos: Mapping[str, Info]) -> None:
        """Add a tensor, after a check that its file has just its elements."""
        file, dtype, shape = check_key(name + _SUFFIX), entry.get("dtype"), entry.get("shape")
        if (
            not isinstance(dtype, str)
            or not isinstance(shape, list)
            or len(shape) > _MAX_DIMS
            or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in shape)
        ):
            raise IntegrityError(
                f"{_INDEX} gives {reprlib.repr(name)} the data type {reprlib.repr(dtype)} and the "
                f"shape {reprlib.repr(shape)}"
            )
        if dtype not in ITEMSIZE:
            self.contents.refuse(Key(name, "weight"), unknown_dtype(dtype))
            return
        box = Box.whole(tuple(shape))
        if file not in infos:
            raise MissingData(
                f"{file} is missing, which {_INDEX} lists",
                hint="the folder is in use, or was not copied whole; offload the model again",
            )
        if infos[file].size != box.size * ITEMSIZE[dtype]:
            raise IntegrityError(
                f"{file} has {infos[file].size:,} bytes, but {dtype} of shape {shape} takes "
                f"{box.size * ITEMSIZE[dtype]:,}",
                hint="another model was offloaded to the same folder, or the file is damaged",
            )
        extent = Extent(box, file, 0, row_major(box.shape, ITEMSIZE[dtype]))
        self.contents.add(name, "weight", dtype, box.shape, partial(_extents, extent))


def _extents(extent: Extent, _within: Box | None) -> Iterator[Extent]:
    if extent.box.size:
        yield extent
