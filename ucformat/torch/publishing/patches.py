"""Brings live tensors to a later version by the patches that lead there, of what this rank holds alone.

Everything that is stored of these is read and checked before the first of them is applied. Patches of a tile are bits:
which to keep of the tile before, and which to flip then. So they are applied to the part of a tile that a rank
holds, where it is.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from ucformat.errors import IntegrityError
from ucformat.format.encoded import adjacent
from ucformat.format.encoding import PATCHES, Encoding, decode_tile
from ucformat.format.tile_index import TileIndex, find_tile
from ucformat.geometry.tensor import single_extents
from ucformat.jobs.run import default_workers
from ucformat.storage.base import stored_key
from ucformat.storage.concurrency import map_io, thread_memory
from ucformat.torch.loading.read import ReadAmount, check_targets, part_of, target_of
from ucformat.torch.loading.share import read_shared
from ucformat.torch.state.elements import dense_elements, elements_within
from ucformat.torch.state.memory import keep_current_device, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.bases import BaseCheckpoint
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.execute import ReadOptions
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Matched


class CurrentVersion(NamedTuple):
    """The version that the ranks hold: its number, the id of its checkpoint, and the fingerprints of its tensors.

    `known` has the ids of this checkpoint and its bases, which patches from here on do not need.
    """

    version: int
    id: str
    fingerprints: Mapping[Key, str | None]
    known: frozenset[str]


class PatchFill:
    """Fills tensors that are those of a version: equal ones stay, others get patches or, without these, are read.

    Args:
        ranks: all that fill together.
        begin: called on all ranks before the first tensor is changed.
    """

    def __init__(self, current: CurrentVersion, ranks: Group, begin: Callable[[], None]) -> None:
        self._current, self._ranks, self._begin = current, ranks, begin

    def __call__(
        self,
        ck: Checkpoint,
        matched: Sequence[Matched],
        ranks: Group,
        replicas: dist.ProcessGroup | None,
        options: ReadOptions,
    ) -> ReadAmount:
        """See Fill."""
        with self._ranks.sharing_errors():
            check_targets(matched)
            others, patches = self._planned(ck, matched)
            nbytes = patches.fetch()
        self._ranks.combine(None)  # all ranks have theirs
        self._begin()
        failure = None
        try:
            patches.apply(options.threads)
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            failure = error
        self._ranks.combine(failure)
        return read_shared(ck, others, ranks, replicas, options).plus(ReadAmount(nbytes))

    def _planned(self, ck: Checkpoint, matched: Sequence[Matched]) -> tuple[list[Matched], Patches]:
        """The targets that are read, and the patches for others."""
        assert ck.universal is not None  # noqa: S101 - a channel has no others
        others, patches = [], Patches()
        for m in matched:
            steps = None
            if m.target.info.dtype == m.stored.dtype:
                steps = patched_from(self._current, ck.universal, m.stored.key)
            if steps is None:
                others.append(m)
            else:
                patches.add(m, steps)
        return others, patches


def patched_from(
    current: CurrentVersion, to: BaseCheckpoint, key: Key
) -> list[BaseCheckpoint] | None:
    """The checkpoints whose patches lead from a version to another one, in order; None if none do."""
    steps: list[BaseCheckpoint] = []
    while True:
        doc = to.docs[key]
        if doc.fingerprint is not None and doc.fingerprint == current.fingerprints.get(key):
            return steps[::-1]
        if doc.base is None or doc.path is not None:
            return None
        if not doc.is_referenced:
            steps.append(to)
        if to.bases.docs[doc.base].id == current.id:  # which need not be there any more
            return steps[::-1]
        to = to.bases.with_tensor(doc, equal=doc.is_referenced)


class _Part(NamedTuple):
    """The part of a stored tile that a target of this rank holds.

    Attributes:
        step: the checkpoint that stores the tile.
        extent: the tile.
    """

    target: Matched
    step: BaseCheckpoint
    extent: Extent

    @property
    def file(self) -> tuple[str, str]:
        """What the tile is stored in."""
        return self.step.store.url, self.extent.file


class _Stored(NamedTuple):
    """A tile that is stored.

    Attributes:
        payload: its bytes, without what comes from a base.
    """

    file: TileIndex
    number: int
    payload: memoryview


class Patches:
    """Patches of tiles for targets of this rank."""

    def __init__(self) -> None:
        # the parts of one turn are of different elements
        self._turns: defaultdict[int, list[_Part]] = defaultdict(list)
        self._stored: dict[tuple[str, str, int], _Stored] = {}

    def add(self, m: Matched, steps: Sequence[BaseCheckpoint]) -> None:
        """Add what checkpoints have for a target, one after the other."""
        for turn, step in enumerate(steps):
            for piece in m.target.pieces:
                boxes = set()
                for extent in single_extents(step.extents(m.stored.key, piece.box), piece.box):
                    common = extent.box.intersect(piece.box)
                    if common is not None and extent.box not in boxes:  # one of its replicas
                        boxes.add(extent.box)
                        part = _Part(part_of(m, piece, common), step, extent)
                        self._turns[turn].append(part)

    def fetch(self) -> int:
        """Read and check what is stored of the tiles, and return how many bytes that are.

        Raises:
            IntegrityError: something is missing or damaged.
        """
        by_file: dict[tuple[str, str], dict[int, _Part]] = {}
        for parts in self._turns.values():
            for part in parts:
                by_file.setdefault(part.file, {})[part.extent.offset] = part
        some = [next(iter(parts.values())) for parts in by_file.values()]
        indexes = map_io(lambda part: _tile_of(part)[0], some)  # so that each is read once
        runs = [
            (part.step.store, index, run)
            for part, index in zip(some, indexes, strict=True)
            for run in adjacent(
                index,
                sorted(
                    n
                    for p in by_file[part.file].values()
                    for n in [_tile_of(p)[1]]
                    if index.stored_sizes[n]
                ),
                part.step.store.costs.request,
            )
        ]
        return sum(map_io(self._read, runs))

    def _read(self, run: tuple[Store, TileIndex, list[int]]) -> int:
        """Read tiles that are stored one after another."""
        store, index, numbers = run
        sizes = index.stored_sizes[numbers].tolist()
        memory = memoryview(bytearray(sum(sizes)))
        store.read_into(index.file, int(index.stored_starts[numbers[0]]), [memory])
        for n, (begin, stop) in zip(numbers, pairwise(accumulate(sizes, initial=0)), strict=True):
            payload = index.payload(n, memory[begin:stop])
            self._stored[store.url, index.file, int(index.starts[n])] = _Stored(index, n, payload)
        return len(memory)

    def apply(self, threads: int | None) -> None:
        """Change the targets.

        Raises:
            IntegrityError: a patch cannot be decoded; some of them have been applied.
        """
        targets = [part.target.target.tensor for parts in self._turns.values() for part in parts]
        synchronize(targets)  # kernels may still use them
        with ThreadPoolExecutor(
            threads or default_workers(), "ucformat-patch", keep_current_device()
        ) as pool:
            for _, parts in sorted(self._turns.items()):
                for _ in pool.map(self._apply, parts):
                    pass
        synchronize(targets)

    def _apply(self, part: _Part) -> None:
        url, file = part.file
        stored = self._stored.get((url, stored_key(file), part.extent.offset))
        if stored is not None:  # else it is equal to that of the base
            _change(part, stored)


def _tile_of(part: _Part) -> tuple[TileIndex, int]:
    tile = find_tile(part.step.store, part.extent)
    if tile is None:
        key, box = part.target.stored.key, part.extent.box
        raise IntegrityError(
            f"{part.step.store.url}: {key} is said to be a patch, and {box} of it is in no index",
            hint="restore the checkpoint from another copy",
        )
    return tile


def _change(part: _Part, stored: _Stored) -> None:
    """Change what a target has of a tile."""
    index, n, payload = stored
    itemsize, encoding = part.target.stored.itemsize, int(index.entries[n]["encoding"])
    where = f"{part.target.stored.key}: the tile {part.extent.box} of {index.file}"

    def decoded(use: str, base: int) -> torch.Tensor:
        """What the target's part of the tile is if all bytes of the base have this value."""
        memory = thread_memory(use, int(index.sizes[n]))
        memory[:] = base
        decode_tile(encoding, payload, memory.data, itemsize, where=where)
        (piece,) = part.target.target.pieces
        elements = elements_within(
            dense_elements(part.extent.box.shape, memory, itemsize), part.extent.box, piece.box
        )
        if itemsize > _WORD_BYTES:
            elements = elements[..., None]
        words = elements.view(f"<i{min(itemsize, _WORD_BYTES)}" if itemsize > 1 else "u1")
        return torch.from_numpy(words).to(target.device)

    target = _words_of(target_of(part.target).detach())
    flipped = decoded("flipped", 0)
    if encoding == Encoding.OVERWRITE:
        # the bits that do not depend on the base are those of elements that are overwritten
        target.bitwise_and_(decoded("other", 0xFF).bitwise_xor_(flipped))
    if encoding in PATCHES:
        target.bitwise_xor_(flipped)
    else:
        target.copy_(flipped)


_WORD_BYTES = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of elements as integers: two for each one of 16 bytes."""
    if tensor.element_size() > _WORD_BYTES:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
