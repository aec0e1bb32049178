"""Copies the files of a checkpoint: each is read once, compared with its checksums, and written while it is read.

A file that differs from the committed one never appears at the destination. Intact files of an interrupted copy are
read back there and kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ucformat.errors import ChecksumError, IntegrityError, MissingData, NotFound, UcformatError
from ucformat.format.attempts import folders_of
from ucformat.format.audit import ShardFile, items, read_through
from ucformat.format.extents import blocks_of
from ucformat.format.sidecar import NO_BLOCK
from ucformat.format.structure import Problem
from ucformat.format.universal import grid_of
from ucformat.geometry.tensor import Key
from ucformat.jobs.finished import FinishedDoc, RecordedJob, TaskDoc
from ucformat.jobs.reopen import other_found, reopen, spec_of
from ucformat.reading.execute import place_checksum
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import checksum
from ucformat.storage.upload import unit_for
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.audit import AuditItem
    from ucformat.format.universal import Universal
    from ucformat.geometry.tensor import Block
    from ucformat.storage.base import Store, Writer

_NAMED = 5  # damaged chunks or blocks of a file that are named
_HINT = "restore it from another copy of the checkpoint; nothing is committed at the destination"


class BlockChecker:
    """Compares the blocks of a file, which may overlap, with their checksums while the file is read."""

    def __init__(self, file: str, blocks: Sequence[tuple[Key, Block]]) -> None:
        self._todo = deque(_BlockSum(file, key, block) for key, block in blocks)  # in the order of their offsets
        self._begun: list[_BlockSum] = []
        self._bad: list[_BlockSum] = []

    def take(self, at: int, data: memoryview) -> None:
        """Take the next bytes of the file."""
        stop = at + len(data)
        while self._todo and self._todo[0].block.offset < stop:
            self._begun.append(self._todo.popleft())
        for each in self._begun:
            each.take(at, data)
        self._bad += [s for s in self._begun if s.end <= stop and not s.ok]
        self._begun = [s for s in self._begun if s.end > stop]

    def damaged(self) -> list[tuple[Key, Block]]:
        """The blocks that differ from their checksums, or end after the file."""
        return [(s.key, s.block) for s in (*self._bad, *self._begun, *self._todo) if s.block.nbytes]


class _BlockSum:
    """The checksum of a block so far, and the one that is stored after it."""

    __slots__ = ("_crc", "_stored", "block", "end", "key")

    def __init__(self, file: str, key: Key, block: Block) -> None:
        self.key, self.block = key, block
        self.end = block.offset + block.nbytes + (4 if block.crc32c is None else 0)
        self._crc = place_checksum(file, block.offset) if block.placed else 0
        self._stored = b""

    def take(self, at: int, data: memoryview) -> None:
        start, stop = self.block.offset, self.block.offset + self.block.nbytes
        self._crc = checksum(data[max(0, start - at) : max(0, stop - at)], self._crc)
        self._stored += data[max(0, stop - at) : max(0, self.end - at)]

    @property
    def ok(self) -> bool:
        crc = self.block.crc32c
        return self._crc == (int.from_bytes(self._stored, "little") if crc is None else crc)


class CopyJob(RecordedJob):
    """Copies the files of a checkpoint, the large ones first."""

    kind = "copy"

    def __init__(self, source: Checkpoint, store: Store) -> None:
        assert source.universal is not None  # noqa: S101 - the caller checks it
        self.opened, self.source, self.store = source, source.universal, store
        self.attempt = self.source.manifest.attempt
        self.files = listed(self.source)
        self.count = len(self.files)
        self.finished = set()
        self.leaves: dict[Key, dict[tuple[int, ...], bytes]] = {}
        self.kept: list[AuditItem] = []  # those that were there already
        self._there = {i.key: i.size for folder in folders_of(self.attempt) for i in store.list(folder)}

    def nbytes(self, task: int) -> int:
        """See Job."""
        return self.files[task].nbytes

    def run(self, task: int) -> TaskDoc:
        """See Job."""
        item = self.files[task]
        leaves, kept = transfer(item, self.source.store, self.store, self._there)
        return TaskDoc.of(task, self.store.info(item.file), leaves, kept=kept)

    def record(self, results: Mapping[int, TaskDoc]) -> str:
        """See Job."""
        return FinishedDoc(parts=self.parts, tasks=tuple(results.values())).model_dump_json()

    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:
        """See RecordedJob; what an earlier run has copied counts as kept, but not what parts have."""
        self.parts = max(self.parts, doc.parts)
        for task in doc.tasks:
            if task.task >= self.count or task.task in self.finished or task.file != self.files[task.task].file:
                continue
            item = self.files[task.task]
            if isinstance(item, ShardFile):
                self.leaves.setdefault(item.key, {})[item.shard] = bytes.fromhex(task.leaves)
            if task.kept or (resumed and not doc.parts):
                self.kept.append(item)
            self.finished.add(task.task)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        place = {"source": spec_of(self.opened), "store": self.store.url}
        return {"job": "copy_files:CopyJob", **place, "id": self.source.manifest.id, "attempt": self.attempt}

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source = reopen(spec["source"])
        if (source.manifest.id, source.manifest.attempt) != (spec["id"], spec["attempt"]):
            raise other_found(source)
        return cls(source, open_store(spec["store"]))


def transfer(item: AuditItem, src: Store, dst: Store, there: Mapping[str, int]) -> tuple[bytes, bool]:
    """Copy a file, unless the destination has it already.

    Args:
        there: the keys and sizes in bytes of the files at the destination.

    Returns:
        The digests of a shard's chunks, and whether the file was there already.
    """
    if there.get(item.file) == item.nbytes and not (isinstance(item, PackedFile) and item.bare):
        try:
            found, wrong = item.check(dst)
        except NotFound:  # removed at this instant
            return copy_file(item, src, dst), False
        if not wrong:
            dst.adopt(item.file)
            return found, True
    return copy_file(item, src, dst), False


def copy_file(item: AuditItem, src: Store, dst: Store) -> bytes:
    """Copy a file."""
    unit = item.grid.chunk_nbytes + 4 if isinstance(item, ShardFile) else unit_for(item.nbytes)
    with dst.create(item.file, unit) as out:
        found, wrong = item.check(src, out)
        if wrong:
            raise _damaged(src, item.file, wrong)
    return found


def listed(source: Universal) -> list[AuditItem]:
    """All files that a manifest names, the large ones first."""
    for key, doc in source.docs.items():
        if doc.path is not None and (missing := source.missing_shards(doc)):
            raise MissingData(f"{missing:,} of the {grid_of(doc).count:,} shards of {key} are missing", hint=_HINT)
    packed = () if source.manifest.sidecar is None else _packed(source)
    return sorted([*items(source), *packed], key=lambda item: -item.nbytes)


def _packed(source: Universal) -> list[PackedFile]:
    sidecar, keys = source.sidecar(), list(source.docs)
    blocks: dict[str, list[tuple[Key, Block]]] = {file: [] for file in sidecar.files}
    for file, tensor, block in blocks_of(sidecar):
        blocks[file].append((keys[tensor], block))
    c = sidecar.columns
    bare = {sidecar.files[n] for n in set(c.file[(c.block_offset == NO_BLOCK) & ~sidecar.tiled].tolist())}

    def made(file: str) -> PackedFile:
        try:
            size = source.store.info(file).size
        except NotFound as error:
            names = _names([key for key, _ in blocks[file]])
            raise MissingData(f"{error.message}{names}", hint=_HINT) from error
        return PackedFile(file, size, tuple(blocks[file]), file in bare)

    return map_io(made, sidecar.files)


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file with checksums of blocks; `bare` if some extents have none."""

    file: str
    nbytes: int
    blocks: tuple[tuple[Key, Block], ...]
    bare: bool
    key: Key | None = None

    def check(self, store: Store, out: Writer | None = None) -> tuple[bytes, list[Problem]]:
        """See AuditItem.

        Args:
            out: a writer that gets a copy of every byte (default: none).
        """
        sums = BlockChecker(self.file, self.blocks)
        read_through(store, self.file, self.nbytes, sums.take, out)
        reason = "crc32c differs (block at byte {})"
        damaged = sums.damaged()
        return b"", [Problem(self.file, reason.format(b.offset), *key, kind="differs") for key, b in damaged]


def _damaged(src: Store, file: str, wrong: Sequence[Problem]) -> UcformatError:
    reasons = [p.reason + (f", chunk {list(p.chunk)}" if p.chunk else "") for p in wrong]
    keys = [Key(p.name, p.state) for p in wrong if p.name is not None and p.state is not None]
    more = f", and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    kinds = {p.kind for p in wrong}
    error = ChecksumError if "differs" in kinds else MissingData if "missing" in kinds else IntegrityError
    return error(f"{src.url}/{file}: {'; '.join(reasons[:_NAMED])}{more}{_names(keys)}", hint=_HINT)


def _names(keys: Sequence[Key]) -> str:
    """` in a (weight), b (weight)`, the first of them."""
    distinct = list(dict.fromkeys(map(str, keys)))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return f" in {', '.join(distinct[:_NAMED])}{more}" if distinct else ""
