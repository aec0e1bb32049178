"""One file of `torch.save` (or a window of a file), opened: its value with lazy tensors, and the extents of those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat import flat_boxes
from ucformat.geometry.tensor import Extent
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.sources.torch_zip import TorchZip
from ucformat.sources.unpickle import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.sources.stand_ins import StoredTensor
    from ucformat.sources.torch_zip import Window
    from ucformat.storage.base import Store

__all__ = ["TorchFile"]


class TorchFile:
    """A file of `torch.save`: `value` is what was saved, with a `StoredTensor` for each tensor."""

    def __init__(self, store: Store, key: str, *, allow: tuple[str, ...] = (), window: Window | None = None) -> None:
        self._zip = TorchZip(store, key, window)
        self.store, self.key = store, key
        label = self._zip.label
        self.value: Any = unpickle(self._zip.pickle, file=label, storage_nbytes=self._zip.nbytes, allow=allow)

    def whole(self, tensor: StoredTensor) -> Iterator[Extent]:
        """The extent of a whole stored tensor; none where it has no elements."""
        if tensor.size:
            unit = ITEMSIZE[tensor.dtype]
            offset = self._zip.offset(tensor.storage) + tensor.offset * unit
            yield Extent(Box.whole(tensor.shape), self.key, offset, tuple(s * unit for s in tensor.strides))

    def flat(self, buffer: StoredTensor, begin: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
        """The extents of elements `start … stop` of a tensor of this shape: in a flat buffer, from `begin` on."""
        if len(buffer.shape) != 1 or buffer.strides != (1,) or not 0 <= begin <= begin + stop - start <= buffer.size:
            raise IntegrityError(
                f"elements {begin} to {begin + stop - start} of a flat buffer in {self.key} are wanted, but it has "
                "shape "
                f"{buffer.shape} and strides {buffer.strides}"
            )
        unit = ITEMSIZE[buffer.dtype]
        first = self._zip.offset(buffer.storage) + (buffer.offset + begin - start) * unit if start < stop else 0
        steps = row_major(shape, unit)
        for box in flat_boxes(shape, start, stop):
            yield Extent(box, self.key, first + sum(i * s for i, s in zip(box.start, steps, strict=True)), steps)

    def read(self, tensor: StoredTensor) -> bytes:
        """The row-major bytes of a small tensor."""
        import numpy as np

        if not tensor.size:
            return b""
        unit = ITEMSIZE[tensor.dtype]
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        data = self.store.read(self.key, self._zip.offset(tensor.storage) + tensor.offset * unit, span * unit)
        raw = np.frombuffer(data, f"V{unit}")
        return np.lib.stride_tricks.as_strided(
            raw, tensor.shape, tuple(s * unit for s in tensor.strides), writeable=False
        ).tobytes()

    def crc32(self, tensor: StoredTensor) -> int:
        """CRC-32 of the storage of a tensor, as the file says; 0 where it does not."""
        return self._zip.crc32(tensor.storage)
