"""A lazy tensor: its shape and dtype are known, its bytes are read when it is sliced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import UnsupportedError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import (
    check_out,
    default_threads,
    is_direct,
    memory_of,
    read_fingerprint,
    read_planned,
)
from ucformat.reading.indexing import parse_index
from ucformat.reading.plan import make_plan
from ucformat.reading.rank import item_for
from ucformat.texts import bytes_text, shape_text

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.execute import Memory
    from ucformat.reading.indexing import Index
    from ucformat.reading.plan import Plan, Verify
    from ucformat.reading.readable import Readable

__all__ = ["Tensor"]

_BUFFER_BYTES = 64 << 20  # bytes that are buffered when an array cannot be filled in place


class Tensor:
    """One tensor in one state. Slicing reads only the slice: `t[0:512, 128:]`, `t[...]`, `np.asarray(t)`."""

    def __init__(self, info: TensorInfo, source: Readable) -> None:
        self.info = info
        self._source = source

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        return self.info.name

    @property
    def state(self) -> str:
        """Its state: `weight`, `master`, `exp_avg`, …."""
        return self.info.state

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.info.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.info.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.info.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of NumPy or `ml_dtypes`; of dtypes that neither has, that of integers with the same bits."""
        return numpy_dtype(self.info.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.info.nbytes

    @property
    def fingerprint(self) -> str:
        """Its fingerprint, 32 hexadecimal digits: as recorded, or else computed from all of its elements.

        It is that of the same elements in any other form, or in memory (`ucformat.torch.fingerprint`).
        """
        recorded = self.recorded_fingerprint
        return read_fingerprint(self._source, self.info) if recorded is None else recorded

    @property
    def recorded_fingerprint(self) -> str | None:
        """Its fingerprint if the checkpoint has recorded it."""
        return self._source.metadata.fingerprints.get(self.info.key)

    @property
    def default_threads(self) -> int:
        """The number of reading threads that suits the store."""
        return self._source.store.costs.parallel or default_threads()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<ucformat.Tensor {self.info.key}: {self.info.dtype} {list(self.shape)}>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from ucformat.drawing import card

        facts = {
            "state": self.state,
            "dtype": self.info.dtype,
            "shape": shape_text(self.shape),
            "size": bytes_text(self.nbytes),
            "checkpoint": self._source.store.url,
            "fingerprint": self.recorded_fingerprint,
        }
        return card(self.name, facts)

    def __getitem__(self, index: Index) -> NDArray[Any]:
        """Read a slice with NumPy's basic indexing: integers, slices and `...`."""
        box, selection = parse_index(index, self.shape, str(self.info.key))
        out = self.read_box(box, None)
        return out[selection] if selection else out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001
        if copy is False:
            raise ValueError(
                f"{self.info.key} is in storage: it cannot become an array without a copy"
            )
        return self.read() if dtype is None else self.read().astype(dtype, copy=False)

    def torch(self) -> torch.Tensor:
        """Read the whole tensor as one of PyTorch, of the same dtype.

        Raises:
            UnsupportedError: PyTorch has no such dtype.
        """
        import torch  # which reading does not need

        dtype = getattr(torch, self.info.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize * self.size != self.nbytes:
            raise UnsupportedError(
                f"{self.info.key} is {self.info.dtype}, which PyTorch does not have",
                hint="read it with NumPy: t[...]",
            )
        raw = self.read().reshape(-1).view(np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(self.shape)

    def numpy(self) -> NDArray[Any]:
        """Read the whole tensor, as `t[...]` does."""
        return self.read()

    def __dlpack__(self, **options: Any) -> Any:
        """Read the whole tensor for `torch.as_tensor`, `np.from_dlpack` and others."""
        # 2 is a dtype of another library; 0 is one of NumPy with an explicit byte order
        is_numpys = self.dtype.isbuiltin < 2
        tensor: Any = self.read() if is_numpys else self.torch()
        return tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """That of memory of the host."""
        return 1, 0

    def read(
        self,
        out: NDArray[Any] | None = None,
        *,
        verify: Verify = "whole",
        threads: int | None = None,
    ) -> NDArray[Any]:
        """Read the whole tensor.

        Args:
            out: the array to fill, of the same shape and dtype (None: a new array). It may have any
                strides: a field of a structured array, or a reversed view; only its elements are
                written.
            verify: which checksums to verify: of chunks that are read `whole` (default), `always`,
                or `never`.
            threads: number of reading threads (None: as many as suit the store).

        Returns:
            `out`, or a new array.

        Raises:
            UsageError: `out` does not fit, is read-only or masked, or its elements share memory.
        """
        if out is not None:
            check_out(out, self.info.dtype, self.shape, str(self.info.key))
            if not is_direct(out):
                return self._read_parts(out, verify, threads)
        return self.read_box(Box.whole(self.shape), out, verify, threads)

    def _read_parts(self, out: NDArray[Any], verify: Verify, threads: int | None) -> NDArray[Any]:
        """Read, part by part, into an array that no plan can fill in place."""
        plain = np.asarray(out)
        rows = max(1, _BUFFER_BYTES // max(1, self.nbytes // max(1, self.shape[0])))
        for at in range(0, self.shape[0], rows):
            n = min(rows, self.shape[0] - at)
            box = Box((at, *[0] * (self.ndim - 1)), (n, *self.shape[1:]))
            plain[at : at + n] = self.read_box(box, None, verify, threads)
        return out

    def plan(self, box: Box | None = None, *, verify: Verify = "whole") -> Plan:
        """The requests that reading a box would make, without making them.

        Args:
            box: the box of the tensor to read (None: all of it).
            verify: which checksums to verify, as for `read`.
        """
        box = box or Box.whole(self.shape)
        plan = self._plan(box, row_major(box.shape), verify)
        return plan.through(self._source.store)

    def _plan(self, box: Box, strides: tuple[int, ...], verify: Verify) -> Plan:
        item = item_for(self._source, self.info, [(0, Piece(box, 0, strides))])
        return make_plan([item], verify, self._source.store.costs)

    def read_box(
        self,
        box: Box,
        out: NDArray[Any] | None,
        verify: Verify = "whole",
        threads: int | None = None,
    ) -> NDArray[Any]:
        """Read a box into an array that plans can fill in place, or into a new one."""
        strides = row_major(box.shape)
        if out is not None:
            strides = tuple(
                s // self.info.itemsize if n > 1 else 0
                for n, s in zip(out.shape, out.strides, strict=True)
            )
        arrays: list[NDArray[Any]] = [] if out is None else [out]

        def memories() -> list[Memory]:
            if not arrays:
                arrays.append(np.empty(box.shape, self.dtype))
            return [memory_of(arrays[0])]

        read_planned(
            self._plan(box, strides, verify),
            self._source.store,
            memories,
            [str(self.info.key)],
            threads,
        )
        return arrays[0]
