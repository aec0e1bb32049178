"""Arrays of NumPy as the source of a checkpoint, for `ucp demo` and for the tests of exporters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Extent, Key, TensorInfo, TensorList
from ucformat.reading.dtypes import dtype_name
from ucformat.reading.readable import CheckpointMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store

_FILE = "elements.bin"


class ArraySource:
    """Arrays, one after the other in a file of a store; further facts are arguments of `CheckpointMetadata`."""

    def __init__(
        self,
        store: Store,
        arrays: Mapping[tuple[str, str], NDArray[Any]],
        kind: str = "arrays",
        **facts: Any,
    ) -> None:
        self.store, self.kind = store, kind
        self._infos: dict[Key, TensorInfo] = {}
        self._offsets: dict[Key, int] = {}
        end = 0
        with store.create(_FILE) as out:
            for (name, state), array in arrays.items():
                info = TensorInfo(name, state, dtype_name(array.dtype), array.shape)
                self._infos[info.key], self._offsets[info.key] = info, end
                out.write(array.tobytes())
                end += array.nbytes
        groups = {n: i for i, g in enumerate(facts.get("groups", ())) for n in g["params"]}
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(tuple(self._infos.values()), groups), files=(_FILE,), **facts
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:  # noqa: ARG002
        """The one extent of a tensor."""
        info = self._infos[key]
        strides = row_major(info.shape, info.itemsize)
        yield Extent(Box.whole(info.shape), _FILE, self._offsets[key], strides)

    def records(self) -> Iterator[FileRecord]:
        """No checksums: the file was just written."""
        return iter(())
