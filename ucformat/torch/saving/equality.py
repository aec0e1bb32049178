"""What must be equal on all ranks that save together: replicas, objects, and the names of what is at a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.errors import UsageError
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Key
from ucformat.reading.garbage import gc_paused
from ucformat.reading.readable import path_to_json
from ucformat.sources.dcp.names import dotted
from ucformat.storage.strided import checksum
from ucformat.torch.state.elements import elements_within, row_major_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.saving.assignment import GlobalTensor, WriteItem
    from ucformat.torch.saving.statement import Row
    from ucformat.torch.state.elements import Elements

_DIFFERS = (
    'save per-rank values as ucformat.torch.PerRank(value), or pass replicas="first" to save that of the first rank'
)

#: Replicas of at most this many bytes are compared before they are saved. Of larger tensors that ranks hold whole, some
#: samples are compared: ranks that hold different parts of the same shape under one name differ in all samples.
_COMPARED_WHOLE = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 4, 1 << 10


@gc_paused()
def checksums(items: Sequence[WriteItem], elements: Callable[[int, int], Elements]) -> list[NDArray[np.uint32]]:
    """Return a checksum of each piece of each item, by which replicas are compared.

    Of a large tensor that a rank holds whole it is that of some samples; of other large pieces it is 0.
    """

    def of(number: int, piece: int, box: Box) -> int:
        info = items[number].info
        if box.size * info.itemsize <= _COMPARED_WHOLE:
            return checksum(row_major_bytes(elements(number, piece)).data)
        return _sum_of_samples(elements(number, piece)) if box.shape == info.shape else 0

    return [np.array([of(n, j, b) for j, b in enumerate(i.boxes)], np.uint32) for n, i in enumerate(items)]


def _sum_of_samples(elements: Elements) -> int:
    whole, few = Box.whole(elements.shape), _SAMPLE_BYTES // elements.itemsize
    step = (whole.size - few) // (_SAMPLES - 1)
    boxes = [box for i in range(_SAMPLES) for box in flat_boxes(whole.shape, i * step, i * step + few)]
    return checksum(np.concatenate([row_major_bytes(elements_within(elements, whole, b)) for b in boxes]).data)


def check_replicas(
    tensors: Sequence[GlobalTensor], items: Sequence[Sequence[WriteItem]], found: Sequence[NDArray[np.uint32]]
) -> None:
    """Check that the replicas of each box have equal checksums."""
    starts = [np.cumsum([0, *(len(c.boxes) for c in of_rank)]) for of_rank in items]
    for tensor in tensors:
        for holders in tensor.holders.values():
            if len(holders) < 2:
                continue
            sums = [found[r][starts[r][item] + piece] for r, item, piece in holders]
            other = next((i for i, s in enumerate(sums) if s != sums[0]), None)
            if other is not None:
                raise UsageError(
                    f"{tensor.info.key} has a different value on rank {holders[other][0]} than on rank {holders[0][0]}",
                    hint=_DIFFERS,
                )


def object_owners(objects: Iterable[tuple[int, Mapping[str, str]]], *, equal: bool) -> dict[str, int]:
    """Return the rank that provides each object: the first that has it.

    Args:
        objects: ranks, ascending, and the digests of their objects by name.
        equal: whether all digests of an object must be equal.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in objects:
        for name, digest in digests.items():
            giver, expected = first.setdefault(name, (rank, digest))
            if digest != expected and equal:
                raise UsageError(
                    f"the object {name!r} has a different value on rank {rank} than on rank {giver}", hint=_DIFFERS
                )
    return {name: rank for name, (rank, _) in first.items()}


def manifest_paths(
    infos: Sequence[TensorInfo], by_key: Mapping[Key, Sequence[Path]]
) -> tuple[tuple[tuple[str | int, ...], ...], ...]:
    """Return the paths of each tensor in the form of manifests."""
    return tuple(tuple(tuple(path_to_json(p)) for p in by_key.get(i.key, ())) for i in infos)


def paths_by_key(
    items: Iterable[tuple[int, Sequence[WriteItem | Row]]], aliases: Mapping[str, str]
) -> dict[Key, list[Path]]:
    """Return the paths of each tensor on any rank."""
    first: dict[Path, tuple[Key, int]] = {}
    out: dict[Key, list[Path]] = {}
    for rank, listed in items:
        for item in listed:
            key = Key(aliases.get(item.info.name, item.info.name), item.info.state)
            for path in item.paths:
                named, other = first.setdefault(path, (key, rank))
                if named != key:
                    raise UsageError(
                        f"{dotted(path)} is named {named} on rank {other}, but {key} on rank {rank}",
                        hint='use the same keys on all ranks, and keep the model under "model"',
                    )
                if (named, other) == (key, rank):
                    out.setdefault(key, []).append(path)
    return out
