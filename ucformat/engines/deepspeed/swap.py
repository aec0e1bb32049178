"""ZeRO 3 with the optimizer on NVMe: flat groups of a mebibyte or more, and their states, are swap files.

`save_checkpoint` copies each rank's swap folder to
`offloaded_tensors/rankRR` in the tag folder. The tensors in the optimizer's file are then empty,
and have an attribute with the name of their file: `ID.tensor.swp` of the master of a group,
`STATE-ID.tensor.swp` of a state. A swap file has the elements in order, padded at the end to the
alignment of asynchronous I/O. Smaller groups stay in the optimizer's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.folder import copy_hint
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.flat_buffer import flat_extents
from ucformat.reading.stand_ins import AttributedTensor, StoredTensor
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.geometry.tensor import Extent

_ID, _FOLDER = "ds_id", "offloaded_tensors/rank"
_HINT = (
    "for the weights load it in DeepSpeed on as many ranks and call engine.save_16bit_model; for all "
    "of the state keep the optimizer in memory when saving (offload_optimizer.device: cpu)"
)


@dataclass(frozen=True, slots=True)
class SwappedTensor(StoredTensor):
    """A flat tensor that is the beginning of a swap file, whose key is `storage`."""

    def extents(
        self, begin: int, shape: tuple[int, ...], start: int, stop: int
    ) -> Iterator[Extent]:
        """The extents of the range [start, stop) of a flattened tensor that is stored at the element `begin`."""
        if not 0 <= begin <= begin + stop - start <= self.numel:
            raise IntegrityError(
                f"elements {begin} to {begin + stop - start} of {self.storage} are wanted, which has "
                f"{self.numel}"
            )
        if start < stop:
            unit = ITEMSIZE[self.dtype]
            yield from flat_extents(shape, start, stop, unit, self.storage, begin * unit)


def rank_file(key: str, rank: int) -> str:
    """The swap file of another rank that is called as one of rank 0."""
    before, _, after = key.rpartition(f"{_FOLDER}00/")
    return f"{before}{_FOLDER}{rank:02d}/{after}"


@dataclass(frozen=True, slots=True)
class SwapFolder:
    """The swap files of one rank: their bytes by key."""

    prefix: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, optimizer: str, rank: int, sizes: Mapping[str, int]) -> SwapFolder:
        """The folder of the rank that wrote this optimizer's file."""
        folder, slash, _ = optimizer.rpartition("/")
        return cls(f"{folder}{slash}{_FOLDER}{rank:02d}/", sizes)

    def restored(self, tensor: Any, elements: int, state: str, label: str) -> Any:
        """A flat tensor of so many elements, which was swapped out if it is empty.

        Args:
            state: `master`, or that of the optimizer.
            label: of the tensor, for errors.
        """
        if not isinstance(tensor, StoredTensor) or tensor.shape != (0,) or not elements:
            return tensor
        called = tensor.attributes.get(_ID, "") if isinstance(tensor, AttributedTensor) else ""
        names_state = "-" not in called if state == "master" else called.startswith(f"{state}-")
        if not called or not names_state or "/" in called:
            raise UnsupportedError(
                f"{label} is empty, and does not say in which swap file it is (offloaded to NVMe)",
                hint=_HINT,
            )
        key = f"{self.prefix}{called}.tensor.swp"
        if key not in self.sizes:
            raise MissingData(f"{key} is missing: {label} was swapped out", hint=copy_hint())
        if self.sizes[key] < elements * ITEMSIZE[tensor.dtype]:
            raise IntegrityError(
                f"{key} has {self.sizes[key]} bytes, and {label} {elements} elements of {tensor.dtype}",
                hint="it was cut short, or is of another save; copy all files of the tag folder",
            )
        return SwappedTensor(key, tensor.dtype, (elements,), (1,), 0, elements)
