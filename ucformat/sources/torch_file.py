"""One file of `torch.save` (or a window of a file), opened: its value with lazy tensors, and the extents of those."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat import flat_boxes
from ucformat.geometry.tensor import Extent
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.sources.stand_ins import Opaque
from ucformat.sources.torch_zip import TorchZip
from ucformat.sources.unpickle import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.sources.stand_ins import StoredTensor
    from ucformat.sources.torch_zip import Window
    from ucformat.storage.base import Store

__all__ = ["ShutFile", "TorchFile", "opaque_file", "open_file"]

_LARGEST = 16 << 20  # bytes of a file that is kept as it is


class ShutFile:
    """A file of `torch.save` that names what is not plain: it is kept as it is, and whoever wants its value is told."""

    def __init__(self, store: Store, key: str, why: Refused, window: Window | None = None) -> None:
        self.key, self._store, self._why, self._window = key, store, why, window

    @property
    def value(self) -> Any:
        """Refused."""
        raise self._why

    def opaque(self) -> Opaque:
        """The file as a value that nobody opens unasked; Refused where it is too large to be kept so."""
        window = self._window
        offset, nbytes = (window.offset, window.nbytes) if window else (0, self._store.info(self.key).size)
        if nbytes > _LARGEST:
            raise self._why
        return opaque_file(self._store.read(self.key, offset, nbytes))


def opaque_file(data: bytes) -> Opaque:
    """A pickle that is `functools.partial(torch.load, weights_only=False)(io.BytesIO(data))`.

    A file of torch.save is a zip archive; an opaque value is a pickle, which `trust=True` opens. It is put together
    here and not by pickle, because torch is not there.
    """
    load = b"ctorch\nload\n"
    partial = b"cfunctools\npartial\n(" + load + b"tR(" + load + b"(t}X\x0c\x00\x00\x00weights_only\x89sNtb"
    file = b"cio\nBytesIO\n(B" + struct.pack("<I", len(data)) + data + b"tR"
    return Opaque(b"\x80\x03" + partial + b"(" + file + b"tR.")


def open_file(
    store: Store, key: str, *, allow: tuple[str, ...] = (), window: Window | None = None
) -> TorchFile | ShutFile:
    """A file (or a window of one), which stays shut where its pickle names what is not plain."""
    try:
        return TorchFile(store, key, allow=allow, window=window)
    except Refused as error:
        return ShutFile(store, key, error, window)


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
