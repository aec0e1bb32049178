"""Files of several whole tensors: where each is stored in them, and in which blocks.

They are the safetensors files of weights, and those of small tensors. All of it is a pure function
of the tensors and of the tied names, so all writers agree on it. Each byte is in one block: those
of a header, those of the index, or some rows of a tensor, about 1 MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ucformat.errors import UsageError
from ucformat.exporters.base import Span, TargetFile, weights_of
from ucformat.exporters.safetensors import files_of
from ucformat.format.arrays import folder_names, packed_keys, put_file
from ucformat.format.chunking import row_block
from ucformat.format.extents import put_sidecar
from ucformat.format.sidecar import Columns, encode_columns
from ucformat.geometry.box import Box, offset_of, row_major
from ucformat.geometry.fingerprint import packed_sums, text_of, unpacked_sums
from ucformat.jobs.export_files import FilesJob
from ucformat.jobs.file_fingerprints import FileFingerprints
from ucformat.jobs.shards import WriteOptions, plan_spec, planned_of
from ucformat.jobs.tasks import job_name
from ucformat.schema.manifest import SidecarDoc, VerifiedDoc
from ucformat.schema.tensors import TensorDoc, TensorTable, quoted
from ucformat.sources.model_files import find_assets
from ucformat.storage.base import Info
from ucformat.storage.strided import CRC32C_SHIFT, checksum
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.jobs.finished import TaskDoc
    from ucformat.schema.manifest import FileDoc
    from ucformat.storage.base import Store

    Crcs = NDArray[np.uint32]


# The files that a conversion writes beside arrays, of weights and of small tensors, as tasks, with
# their checksums.


def plan_files(
    source: Checkpoint, infos: Sequence[TensorInfo], attempt: str, weights: str | None
) -> PlacedFiles | None:
    """Plan the files of a conversion that are no arrays; None if there are none."""
    if weights is None:
        packed = packed_keys(infos)
        return (
            PlacedFiles(small_files([i for i in infos if i.key in packed], attempt))
            if packed
            else None
        )
    chosen = weights_of(infos)
    if not chosen:
        raise UsageError(
            f"{source.url}: no weights are to be converted, and so there are none for "
            "safetensors files",
            hint="leave out the weights option, or convert the state weight or master too",
        )
    chosen_keys = {info.key for info in chosen}
    others = [info for info in infos if info.key not in chosen_keys]
    packed = packed_keys(others)
    folder = weights_folder(attempt, {info.state for info in others if info.key not in packed})
    small = small_files([info for info in others if info.key in packed], attempt)
    return WeightFiles(chosen, source.aliases, folder, source.metadata.part_of, small)


class WeightsJob(FilesJob):
    """Writes the files of a universal checkpoint that are no arrays, the large ones first."""

    kind = "convert"

    def __init__(
        self,
        source: Checkpoint,
        store: Store,
        attempt: str,
        infos: Sequence[TensorInfo],
        files: PlacedFiles,
        options: WriteOptions,
        weights: str | None = "safetensors",
    ) -> None:
        self.attempt = attempt
        self.infos = infos
        self.placed = files
        self.options = options
        self._weights = weights
        self._order = sorted(range(len(files.files)), key=lambda n: -files.files[n].nbytes)
        self._crcs = np.zeros(files.count, np.uint32)
        self._bare: set[Key] = set()
        self._fingerprints: dict[Key, str] = {}  # of the tensors in the files of finished tasks
        super().__init__(
            source, store, [files.files[n] for n in self._order], verify=options.verify
        )

    def spec(self) -> dict[str, Any]:
        """See Job."""
        plan = plan_spec(self.source, self.store, self.attempt, self.infos, self.options)
        return {"job": job_name(self), "weights": self._weights, **plan}

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source, infos, options = planned_of(spec)
        weights = spec["weights"]
        files = plan_files(source, infos, spec["attempt"], weights)
        assert files is not None  # noqa: S101 - there is a job for them
        return cls(
            source, open_store(spec["store"]), spec["attempt"], infos, files, options, weights
        )

    def write_task(self, task: int) -> tuple[bool, bytes, bytes]:
        """See FilesJob."""
        number = self._order[task]
        tensors = self.placed.tensors_in(number)
        crcs = _BlockSums(self.placed.block_sizes(number).tolist())
        fingerprints = FileFingerprints(
            [(placed.info, Box.whole(placed.info.shape), placed.offset) for placed in tensors]
        )

        def take(data: memoryview) -> None:
            crcs.take(data)
            fingerprints.take(data)

        bare = self.write(self.files[task], take)
        sums = packed_sums(fingerprints.parts, len(tensors))
        return bare, sums, np.array(crcs.done, "<u4").tobytes()

    def take_recorded(self, task: TaskDoc) -> None:
        """See FilesJob."""
        number = self._order[task.task]
        blocks, crcs = self.placed.numbers(number), np.frombuffer(bytes.fromhex(task.crcs), "<u4")
        tensors, sums = self.placed.tensors_in(number), unpacked_sums(bytes.fromhex(task.digests))
        # a record of something else: the file is written again
        if (len(crcs), len(sums)) != (len(blocks), len(tensors)):
            self.finished.discard(task.task)
            return
        self._crcs[blocks.start : blocks.stop] = crcs
        for placed, of_tensor in zip(tensors, sums, strict=True):
            self._fingerprints[placed.info.key] = text_of(of_tensor)
        if task.bare:
            self._bare.update(
                key for key, placed in self.placed.tensors.items() if placed.file == number
            )

    @property
    def folder(self) -> str | None:
        """The key of the folder of safetensors files; None if there are none."""
        return self.placed.folder

    def finish(self) -> tuple[Mapping[Key, TensorDoc], VerifiedDoc]:
        """Complete the checksums of the source; call it when all tasks are finished.

        Returns:
            The tensors in files, for the manifest, and which of them were verified.

        Raises:
            Conflict: a file of the source has changed.
        """
        self.check_source()
        infos = [placed.info for placed in self.placed.tensors.values()]
        docs = {
            i.key: TensorDoc(
                i.name, i.state, i.dtype, i.shape, fingerprint=self._fingerprints[i.key]
            )
            for i in infos
        }
        verifier = self.input.verifier
        if verifier is None:
            return docs, VerifiedDoc(default=False)
        return docs, verifier.described(infos, self._bare)

    def put_sidecar(self) -> tuple[SidecarDoc, tuple[str, ...]]:
        """Write the sidecar, with the extents of the tensors in files, as the format's `put_sidecar`.

        Call it when all tasks are finished.
        """
        number = {info.key: n for n, info in enumerate(self.infos)}
        data = encode_columns(*self.placed.columns(number, self._crcs))
        tensors = TensorTable.of(TensorDoc(i.name, i.state, i.dtype, i.shape) for i in self.infos)
        return put_sidecar(self.store, f"data/{self.attempt}", data, tensors)


class _BlockSums:
    """The CRC-32C of each block of a file, which is taken from beginning to end."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._left, self._crc = sizes[0] if sizes else 0, 0
        self.done: list[int] = []

    def take(self, data: memoryview) -> None:
        data = data.cast("B")
        while data:
            part, data = data[: self._left], data[self._left :]
            self._crc = checksum(part, self._crc)
            self._left -= len(part)
            if not self._left:
                self.done.append(self._crc)
                self._crc = 0
                self._left = self._sizes[len(self.done)] if len(self.done) < len(self._sizes) else 0


BLOCK_BYTES = 1 << 20  # of a block, at most, unless one element of the last dim is larger
_SMALL_FILE_BYTES = 64 << 20  # of a file of small tensors, at most


def weights_folder(attempt: str, states: Iterable[str]) -> str:
    """The folder of the files: `data/<attempt>/weights`, unless that is the folder of a state."""
    taken = {folder.lower() for folder in folder_names(set(states)).values()}
    return f"data/{attempt}/weights{'~' if 'weights' in taken else ''}"  # a tilde is otherwise followed by a hash


def put_assets(
    store: Store, attempt: str, folder: str | None, assets: Mapping[str, bytes]
) -> dict[str, FileDoc]:
    """Write the assets of a checkpoint.

    Args:
        folder: of the safetensors files, which get those beside them that Hugging Face's tools read
            (None: there are no such files).
    """
    names = () if folder is None else find_assets(Info(name, 0, "") for name in assets)
    beside = {name for name in names if "/".join(map(quoted, name.split("/"))) == name}
    return {
        name: put_file(
            store, f"{folder}/{name}" if name in beside else f"assets/{attempt}/{own}", assets[name]
        )
        for name, own in folder_names(assets).items()
    }


class FixedBlock(NamedTuple):
    """The bytes of a header, or of the index: block number `number`, at the beginning of a file."""

    file: int
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor in a file, row-major, cut into blocks of consecutive rows.

    Attributes:
        offset: the byte of the file at which it begins.
        edges: the shape of a block, in elements.
        first: the number of its first block.
    """

    info: TensorInfo
    file: int
    offset: int
    edges: tuple[int, ...]
    first: int

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of blocks along each dim."""
        return tuple(-(-n // e) for n, e in zip(self.info.shape, self.edges, strict=True))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.grid)

    @property
    def is_one_block(self) -> bool:
        """Whether it is not cut, and has elements."""
        return self.edges == self.info.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of the file from an element to the next, along each dim."""
        return row_major(self.info.shape, self.info.itemsize)

    def at(self, start: Sequence[int]) -> int:
        """The byte of the file at which an element begins."""
        return self.offset + offset_of(start, self.strides)

    def blocks(self, within: Box) -> Iterator[tuple[int, Box]]:
        """The blocks that intersect a box of the tensor, each with its number."""
        if not within.size:
            return
        grid, shape, edges = self.grid, self.info.shape, self.edges
        first = [a // e for a, e in zip(within.start, edges, strict=True)]
        counts = [(b - 1) // e + 1 - f for b, e, f in zip(within.stop, edges, first, strict=True)]
        for index in np.ndindex(*counts):
            at = tuple(f + i for f, i in zip(first, index, strict=True))
            start = tuple(i * e for i, e in zip(at, edges, strict=True))
            box = Box(
                start, tuple(min(e, n - a) for e, n, a in zip(edges, shape, start, strict=True))
            )
            yield self.first + offset_of(at, row_major(grid)), box

    def blocks_around(self, box: Box) -> range:
        """The numbers from the first to the last block that intersects a box, and those between them."""

        def number(index: Sequence[int]) -> int:
            return sum(
                i // e * s for i, e, s in zip(index, self.edges, row_major(self.grid), strict=True)
            )

        return range(
            self.first + number(box.start), self.first + number([n - 1 for n in box.stop]) + 1
        )

    def boxes(self, blocks: range) -> Iterator[Box]:
        """Boxes that together are this tensor's blocks in a range, in the order of the file."""
        shape, edges, grid, count = self.info.shape, self.edges, self.grid, self.count
        first, stop = (min(max(n - self.first, 0), count) for n in (blocks.start, blocks.stop))
        if first >= stop:
            return
        if grid[:1] == (count,):  # only the first dim is cut, as of nearly all
            start, end = first * edges[0], min(stop * edges[0], shape[0])
            yield Box((start, *(0,) * (len(shape) - 1)), (end - start, *shape[1:]))
            return
        for number in range(first, stop):
            at = (
                tuple(
                    int(i) * e for i, e in zip(np.unravel_index(number, grid), edges, strict=True)
                )
                if grid
                else ()
            )
            yield Box(at, tuple(min(e, n - a) for e, n, a in zip(edges, shape, at, strict=True)))

    def rows(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of all blocks the first index, the shape, the byte of the file, and the bytes."""
        ndim, edges = len(self.edges), np.array(self.edges, np.int64)
        start = np.indices(self.grid, np.int64).reshape(ndim, self.count).T * edges
        shape = np.minimum(edges, np.array(self.info.shape, np.int64) - start)
        offset = self.offset + start @ np.array(self.strides, np.int64)
        return start, shape, offset, shape.prod(axis=1) * self.info.itemsize


def small_files(infos: Iterable[TensorInfo], attempt: str) -> list[TargetFile]:
    """Plan the files of small tensors: those with wide elements first, so that all are aligned."""
    files: list[list[TensorInfo]] = []
    nbytes = 0
    for info in sorted(infos, key=lambda i: -i.itemsize):
        if not files or nbytes + info.nbytes > _SMALL_FILE_BYTES:
            files.append([])
            nbytes = 0
        files[-1].append(info)
        nbytes += info.nbytes
    return [
        TargetFile.of(f"data/{attempt}/small-{number:05}.bin", *map(Span.whole, of_file))
        for number, of_file in enumerate(files)
    ]


class PlacedFiles:
    """Files, their blocks, and the tensors in them.

    Attributes:
        folder: the key of the folder of safetensors files; None if there are none.
    """

    def __init__(self, files: Iterable[TargetFile], folder: str | None = None) -> None:
        self.folder = folder
        self.files = tuple(files)
        self.fixed: list[FixedBlock] = []
        self.tensors: dict[Key, PlacedTensor] = {}
        self._first: list[int] = []  # the number of the first block of each file
        self.count = 0
        for file, target in enumerate(self.files):
            self._first.append(self.count)
            offset = 0
            for part in target.parts():
                if isinstance(part, Span):
                    (info, _), *_ = part.pieces
                    edges = row_block(info.shape, info.itemsize, BLOCK_BYTES)
                    placed = PlacedTensor(info, file, offset, edges, self.count)
                    self.tensors[info.key] = placed
                    self.count += placed.count
                    offset += info.nbytes
                elif isinstance(part, bytes):
                    self.fixed.append(FixedBlock(file, self.count, part))
                    self.count += 1
                    offset += len(part)

    def tensors_in(self, file: int) -> list[PlacedTensor]:
        """The tensors of a file, in their order."""
        return [placed for placed in self.tensors.values() if placed.file == file]

    def numbers(self, file: int) -> range:
        """The numbers of the blocks of a file, in their order."""
        return range(self._first[file], [*self._first, self.count][file + 1])

    def block_sizes(self, file: int) -> NDArray[np.int64]:
        """The bytes of each block of a file, in their order."""
        sizes = np.zeros(len(self.numbers(file)), np.int64)
        begin = self._first[file]
        for block in self.fixed:
            if block.file == file:
                sizes[block.number - begin] = len(block.data)
        for placed in self.tensors.values():
            if placed.file != file:
                continue
            at = placed.first - begin
            if placed.is_one_block:
                sizes[at] = placed.info.nbytes
            else:
                sizes[at : at + placed.count] = placed.rows()[3]
        return sizes

    def columns(self, number: Mapping[Key, int], crcs: Crcs) -> tuple[Columns, list[str]]:
        """The extents for the sidecar, and the keys of the files that they number.

        A block of bytes that belong to no tensor, a header or the index, is that of an extent
        without elements. If all tensors have no dims, there is none, and the header is in the block
        of the first tensor.
        """
        parts: list[tuple[NDArray[np.int64], ...]] = []
        by_dim: list[tuple[NDArray[np.int64], ...]] = []
        before: dict[int, FixedBlock] = {}
        uncut: list[tuple[int, PlacedTensor]] = []  # that follow each other: there may be many

        def add_uncut() -> None:
            rows = [
                (n, t.file, t.offset, t.offset, t.info.nbytes, int(crcs[t.first])) for n, t in uncut
            ]
            shapes = [n for _, t in uncut for n in t.info.shape]
            strides = [n for _, t in uncut for n in t.strides]
            uncut.clear()
            if rows:
                parts.append(tuple(np.array(rows, np.int64).T))
                sides = [np.array(column, np.int64) for column in (shapes, strides)]
                by_dim.append((np.zeros(len(shapes), np.int64), sides[0], sides[1]))

        for block in self.fixed:
            carrier = self._carrier(block.file)
            if carrier is None:
                before[block.file] = block
                continue
            none = np.zeros(len(carrier.edges), np.int64)
            row = (
                number[carrier.info.key],
                block.file,
                0,
                0,
                len(block.data),
                int(crcs[block.number]),
            )
            parts.append(tuple(np.array([value], np.int64) for value in row))
            by_dim.append((none, none, none))
        for key, placed in self.tensors.items():
            if placed.is_one_block and placed.file not in before:
                uncut.append((number[key], placed))
                continue
            add_uncut()
            start, shape, offset, nbytes = placed.rows()
            n, sums = (
                placed.count,
                crcs[placed.first : placed.first + placed.count].astype(np.int64),
            )
            begin = offset.copy()
            if n and placed.file in before:
                block = before.pop(placed.file)
                # the CRC of the header followed by the block, from those of the two
                sums[0] ^= CRC32C_SHIFT(int(crcs[block.number]), int(nbytes[0]))
                begin[0], nbytes[0] = 0, nbytes[0] + offset[0]
            parts.append(
                (np.full(n, number[key]), np.full(n, placed.file), offset, begin, nbytes, sums)
            )
            strides = np.broadcast_to(np.array(placed.strides, np.int64), shape.shape)
            by_dim.append((start.reshape(-1), shape.reshape(-1), strides.reshape(-1)))
        add_uncut()
        names = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
        rows = {
            name: _joined(column)
            for name, column in zip(names, zip(*parts, strict=True), strict=True)
        }
        start, shape, strides = map(_joined, zip(*by_dim, strict=True))
        return Columns(**rows, start=start, shape=shape, strides=strides), [
            file.key for file in self.files
        ]

    def _carrier(self, file: int) -> PlacedTensor | None:
        """A tensor with dims, of which an extent has no elements: of this file, if there is one."""
        with_dims = [placed for placed in self.tensors.values() if placed.edges]
        return next(
            (placed for placed in with_dims if placed.file == file), next(iter(with_dims), None)
        )


class WeightFiles(PlacedFiles):
    """The safetensors files of weights, and further files.

    Args:
        part_of: what the checkpoint is only a part of (default: it is whole).
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        tied: Mapping[str, str],
        folder: str,
        part_of: str = "",
        others: Iterable[TargetFile] = (),
    ) -> None:
        files = files_of(infos, tied, part_of=part_of)
        super().__init__(
            [*(replace(f, key=f"{folder}/{f.key}", last=False) for f in files), *others], folder
        )


def _joined(columns: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *columns])
