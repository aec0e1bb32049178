"""What follows from all that ranks state: the plan of all, on rank 0, and each rank's part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ucformat.schema.tensors import TensorDoc, TensorTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.format.described import Described
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.torch.saving.shards import ShardBatch, Transfer
    from ucformat.torch.saving.statement import Exceptions, ListedTensor

Paths = tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True)
class PlannedTensors:
    """Tensors that are stored in one way, in the order of rank 0, then of others; listed ones last.

    Attributes:
        paths: of each tensor, in the form of manifests.
        described: those that are described, unless they are arrays.
    """

    infos: tuple[TensorInfo, ...]
    paths: tuple[Paths, ...]
    listed: tuple[ListedTensor, ...] = ()
    described: Described | None = None

    @cached_property
    def table(self) -> TensorTable:
        """The tensors as in the manifest, if they are no arrays."""
        return TensorTable.of(self.docs())

    def docs(self) -> Iterator[TensorDoc]:
        """The rows of `table`."""
        rows = zip(self.infos, self.paths, strict=True)
        return (TensorDoc(*i.key, i.dtype, i.shape, at=at) for i, at in rows)


class GlobalPlan(NamedTuple):
    """The plan of all ranks, on rank 0: `digest` of the exceptions, and `aliases`, the tied names."""

    exceptions: Exceptions
    digest: bytes
    aliases: Mapping[str, str]
    arrays: PlannedTensors
    packed: PlannedTensors
    weights: PlannedTensors


class OwnPart(NamedTuple):
    """What follows from descriptions for one rank.

    Attributes:
        pieces: the (item, piece) of its packed file, in order.
        listed_at: the byte of this file at which the boxes of listed tensors begin.
        batches: the shards of arrays that it writes.
        messages: the fragments that it sends.
        weights: the (item, piece) that it provides of weights.
    """

    pieces: tuple[tuple[int, int], ...]
    listed_at: int
    batches: tuple[ShardBatch, ...]
    messages: tuple[Transfer, ...]
    weights: tuple[tuple[int, int], ...]
