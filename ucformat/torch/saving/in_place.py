"""The safetensors form: weights are written in place in files that other tools load, everything else as arrays.

The ranks plan both parts one after the other: who writes which box of a weight as in the packed form, without sending
elements, and the arrays as in the Zarr form. The place of each weight follows from the list of all weights, which rank
0 tells the others. A rank sums the checksum of a block over the bytes that it writes, as if all others were zeros:
since a CRC is linear, those of all ranks together are that of the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.errors import IntegrityError, UsageError
from ucformat.exporters.base import weights_of
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.weight_files import WeightFiles, weights_folder
from ucformat.storage.crc import CRC32C_SHIFT
from ucformat.storage.in_place import InPlaceFile, local_store
from ucformat.storage.strided import checksum
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.plan import Held, plan_save
from ucformat.torch.state.elements import copy_common, dense_elements, elements_within, row_major_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucformat.format.commit import Attempt
    from ucformat.geometry.box import Box
    from ucformat.jobs.weight_files import PlacedTensor
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.assignment import GlobalPlan
    from ucformat.torch.saving.options import SaveOptions

__all__ = ["InPlace", "block_crcs", "plan_in_place", "split", "write_in_place"]


class InPlace(NamedTuple):
    """The weights of a save.

    Attributes:
        held: what this rank holds of them.
        pieces: the (item, piece) that it writes.
        files: the files of all ranks.
        plan: of all ranks, on rank 0.
    """

    held: Held
    pieces: tuple[tuple[int, int], ...]
    files: WeightFiles
    plan: GlobalPlan | None


@message
class _Weights:
    """All weights in the order of the files, the tied names, and the folder."""

    infos: tuple[TensorInfo, ...]
    tied: Mapping[str, str]
    folder: str


def split(held: Held) -> tuple[Held, Held]:
    """What a rank holds of weights, and everything else.

    Args:
        held: what it saves.
    """
    chosen = {info.key for info in weights_of(item.info for item in held.items)}
    numbers: tuple[list[int], list[int]] = ([], [])
    for number, item in enumerate(held.items):
        numbers[item.info.key not in chosen].append(number)
    return _part(held, numbers[0], {}), _part(held, numbers[1], held.objects)


def _part(held: Held, numbers: Sequence[int], objects: Mapping[str, object]) -> Held:
    return Held(
        [held.items[n] for n in numbers],
        [held.distributions[n] for n in numbers],
        held.aliases,
        objects,
        lambda item, piece: held.elements(numbers[item], piece),
    )


def plan_in_place(
    group: Group, options: SaveOptions, store: Store, weights: Held, others: GlobalPlan | None, attempt: Attempt | None
) -> InPlace:
    """Plan the files of the weights; all ranks call this together, after the plan of everything else.

    Args:
        group: the ranks.
        options: of the save.
        store: of the checkpoint.
        weights: what this rank holds of them.
        others: on rank 0, the plan of everything else.
        attempt: on rank 0, the attempt.

    Raises:
        UsageError: there are no weights, or ranks disagree on what is one.
        UnsupportedError: safetensors has no such dtype or name.
    """
    part = group.for_call(group.call)
    part.cache = group.cache.setdefault("weights", {})
    assignment, _, plan = plan_save(part, replace(options, form="packed"), store, weights, attempt)

    def answer(tied: Mapping[str, str]) -> _Weights:
        assert plan is not None  # noqa: S101 - rank 0 has them
        assert others is not None  # noqa: S101
        if not plan.infos:
            raise UsageError("the state has no weights, and so there are none for safetensors files", hint=_OTHER)
        both = {i.key for i in plan.infos} & {i.key for i in others.infos}
        if both or len({i.name for i in plan.infos}) < len(plan.infos):
            named = f"{min(both)} is" if both else "masters are"
            raise UsageError(f"{named} a weight on some ranks, and on others there is another weight", hint=_OTHER)
        folder = weights_folder(assignment.attempt, {i.state for i in others.infos})
        WeightFiles(plan.infos, tied, folder)  # raises if there can be none
        return _Weights(plan.infos, tied, folder)

    found: _Weights = group.combine(weights.aliases, lambda a, b: {**b, **a}, Mapping[str, str], answer, _Weights)
    return InPlace(weights, assignment.part.pieces, WeightFiles(found.infos, found.tied, found.folder), plan)


_OTHER = 'save with form="zarr" or form="packed"'


def write_in_place(store: Store, weights: InPlace, rank: int, progress: Callable[[int], None]) -> bytes:
    """Write this rank's part of the files; rank 0 also writes their headers, and the index.

    Args:
        store: of the checkpoint.
        weights: the plan.
        rank: the rank.
        progress: called with the bytes of each write.

    Returns:
        Of each part of a block that it has written: the number of the block, the bytes, and what they contribute to its
        checksum, as three integers of 32 bits.
    """
    place, files = local_store(store), weights.files
    opened: dict[int, InPlaceFile] = {}
    sums: list[tuple[int, int, int]] = []
    band = np.empty(0, np.uint8)

    with ExitStack() as stack:

        def file_of(number: int) -> InPlaceFile:
            if number not in opened:
                planned = files.files[number]
                opened[number] = stack.enter_context(InPlaceFile(place, planned.key, planned.nbytes))
            return opened[number]

        for fixed in files.fixed if rank == 0 else ():
            file_of(fixed.file).write(0, fixed.data)
            sums.append((fixed.number, len(fixed.data), _linear(memoryview(fixed.data), 0)))
            progress(len(fixed.data))
        for item, piece in weights.pieces:
            info, box = weights.held.items[item].info, weights.held.items[item].boxes[piece]
            placed, elements = files.tensors[info.key], weights.held.elements(item, piece)
            for number, block in placed.blocks(box):
                common = box.intersect(block)
                assert common is not None  # noqa: S101 - it is one of those that intersect
                nbytes, whole = common.size * info.itemsize, block.size * info.itemsize
                begin, part = placed.at(block.start), elements_within(elements, box, common)
                run = _run(common, placed)
                if run == common.size:
                    data, at = row_major_bytes(part), placed.at(common.start)
                    file_of(placed.file).write(at, data.data)
                    sums.append((number, nbytes, _linear(data.data, begin + whole - at - nbytes)))
                else:
                    if band.size < whole:
                        band = np.empty(whole, np.uint8)
                    room = band[:whole]
                    room[:] = 0
                    copy_common(part, common, dense_elements(block.shape, room, info.itemsize), block)
                    sums.append((number, nbytes, _linear(room.data, 0)))
                    starts = [start - begin for start in _run_starts(common, placed, run)]
                    file_of(placed.file).write(begin, room.data, [(a, a + run * info.itemsize) for a in starts])
                progress(nbytes)
    return np.array(sums, "<u4").tobytes()


def _run(box: Box, placed: PlacedTensor) -> int:
    """How many elements of a box follow each other in the file."""
    run = 1
    for n, edge in zip(reversed(box.shape), reversed(placed.info.shape), strict=True):
        run *= n
        if n != edge:
            break
    return run


def _run_starts(box: Box, placed: PlacedTensor, run: int) -> list[int]:
    """The byte of the file at which each run of a box begins."""
    offsets, size = np.array(placed.at(box.start), np.int64), box.size
    for n, stride in zip(box.shape, placed.strides, strict=True):
        if size <= run:
            break
        offsets = offsets[..., None] + np.arange(n) * stride
        size //= n
    return [int(start) for start in offsets.reshape(-1)]


def _linear(data: memoryview, after: int) -> int:
    """The CRC-32C of bytes without that of as many zeros, followed by `after` zeros."""
    return CRC32C_SHIFT(checksum(data) ^ _zeros(data.nbytes), after)


@lru_cache(maxsize=1 << 10)
def _zeros(nbytes: int) -> int:
    return checksum(memoryview(bytes(nbytes)))


def block_crcs(files: WeightFiles, sums: bytes) -> NDArray[np.uint32]:
    """The CRC-32C of all blocks.

    Args:
        files: the files.
        sums: of all ranks, as from `write_in_place`.

    Raises:
        IntegrityError: bytes of a block were written by no rank.
    """
    number, nbytes, part = np.frombuffer(sums, "<u4").reshape(-1, 3).T
    sizes = np.concatenate([files.block_sizes(file) for file in range(len(files.files))])
    written, crcs = np.zeros(files.count, np.int64), np.zeros(files.count, np.uint32)
    np.add.at(written, number, nbytes)
    np.bitwise_xor.at(crcs, number, part)
    if (wrong := np.flatnonzero(written != sizes)).size:
        raise IntegrityError(
            f"the ranks wrote {written[wrong[0]]} of the {sizes[wrong[0]]} bytes of a block of weights"
        )
    each, which = np.unique(sizes, return_inverse=True)
    return crcs ^ np.array([_zeros(n) for n in each.tolist()], np.uint32)[which]
