"""Copies a universal checkpoint to another place: the same bytes under the same id.

The manifest is copied byte by byte, so the attempt that it names keeps its name. Two processes that
copy a checkpoint to the same place at once write the same files, and the second one finds the work
done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    ChecksumError,
    Conflict,
    IntegrityError,
    MissingData,
    NotACheckpoint,
    NotFinished,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
    check_choice,
    first_names,
)
from ucformat.format.attempts import folders_of
from ucformat.format.audit import ShardFile, items, wrong_digests
from ucformat.format.bases import place_of_base, url_of_base
from ucformat.format.commit import announce, begin, commit, settle
from ucformat.format.encoded import find_image
from ucformat.format.extents import blocks_of, encoded_files
from ucformat.format.sidecar import NO_BLOCK
from ucformat.format.structure import (
    Problem,
    find_manifest,
    parse_manifest,
    read_manifest,
    sibling_name,
)
from ucformat.format.tile_index import TileIndex
from ucformat.format.universal import Universal, grid_of
from ucformat.geometry.tensor import Block, Key
from ucformat.jobs.dependents import need_base
from ucformat.jobs.documents import copy_document
from ucformat.jobs.finished import FinishedDoc, RecordedJob, TaskDoc, discard_finished
from ucformat.jobs.materialize import is_packed, materialize
from ucformat.jobs.record import record_commits
from ucformat.jobs.reopen import other_found, reopen, spec_of
from ucformat.jobs.run import workers_for
from ucformat.jobs.shards import WriteOptions
from ucformat.jobs.tasks import job_name
from ucformat.jobs.where import HERE, Where, run_job
from ucformat.reading.execute import place_checksum
from ucformat.references import open_reference
from ucformat.schema import MANIFEST
from ucformat.signatures import copy_signature
from ucformat.storage.base import read_parts
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import checksum
from ucformat.storage.upload import unit_for
from ucformat.storage.url import as_store, open_store
from ucformat.storage.wrappers import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.format.audit import AuditItem
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import FileWriter, Store


# Copies the files of a checkpoint: each is read once, compared with its checksums, and written
# while it is read.
#
# A file that differs from the committed one never appears at the destination. Intact files of an
# interrupted copy are read back there and kept.


_NAMED = 5  # damaged chunks or blocks of a file that are named
_HINT = "restore it from another copy of the checkpoint; nothing is committed at the destination"


class BlockChecker:
    """Compares the blocks of a file, which may overlap, with checksums while it is read."""

    def __init__(self, file: str, blocks: Sequence[tuple[Key | None, Block]]) -> None:
        # in the order of their offsets
        self._todo = deque(_BlockSum(file, key, block) for key, block in blocks)
        self._begun: list[_BlockSum] = []
        self._bad: list[_BlockSum] = []

    def take(self, at: int, data: memoryview) -> None:
        """Take the next bytes of the file."""
        stop = at + len(data)
        while self._todo and self._todo[0].block.offset < stop:
            self._begun.append(self._todo.popleft())
        for block_sum in self._begun:
            block_sum.take(at, data)
        self._bad += [s for s in self._begun if s.end <= stop and not s.ok]
        self._begun = [s for s in self._begun if s.end > stop]

    def damaged(self) -> list[tuple[Key | None, Block]]:
        """The blocks that differ from their checksums, or end after the file."""
        return [(s.key, s.block) for s in (*self._bad, *self._begun, *self._todo) if s.block.nbytes]


class _BlockSum:
    """The checksum of a block so far, and the one that is stored after it."""

    __slots__ = ("_crc", "_stored", "block", "end", "key")

    def __init__(self, file: str, key: Key | None, block: Block) -> None:
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
        self.shards: dict[Key, dict[tuple[int, ...], bytes]] = {}
        self.kept: list[AuditItem] = []  # those that were there already
        self._there = _sizes(store, self.source.manifest)

    def nbytes(self, task: int) -> int:
        """See Job."""
        return self.files[task].nbytes

    def run(self, task: int) -> TaskDoc:
        """See Job."""
        item = self.files[task]
        digests, kept = transfer(item, self.source.store, self.store, self._there)
        return TaskDoc.of(task, self.store.info(item.file), digests, kept=kept)

    def record(self, results: Mapping[int, TaskDoc]) -> str:
        """See Job."""
        return FinishedDoc(parts=self.parts, tasks=tuple(results.values())).model_dump_json()

    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:
        """See RecordedJob; what an earlier run has copied counts as kept, but not parts' work."""
        self.parts = max(self.parts, doc.parts)
        for task in doc.tasks:
            if (
                task.task >= self.count
                or task.task in self.finished
                or task.file != self.files[task.task].file
            ):
                continue
            item = self.files[task.task]
            if isinstance(item, ShardFile):
                digests = bytes.fromhex(task.digests)
                if len(digests) != item.digests_nbytes:
                    continue
                self.shards.setdefault(item.key, {})[item.shard] = digests
            if task.kept or (resumed and not doc.parts):
                self.kept.append(item)
            self.finished.add(task.task)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        place = {"source": spec_of(self.opened), "store": self.store.url}
        return {
            "job": job_name(self),
            **place,
            "id": self.source.manifest.id,
            "attempt": self.attempt,
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source = reopen(spec["source"])
        if (source.manifest.id, source.manifest.attempt) != (spec["id"], spec["attempt"]):
            raise other_found(source)
        return cls(source, open_store(spec["store"]))


def transfer(
    item: AuditItem, src: Store, dst: Store, there: Mapping[str, int]
) -> tuple[bytes, bool]:
    """Copy a file, unless the destination has it already.

    Args:
        there: the keys and sizes in bytes of the files at the destination.

    Returns:
        The digests of a shard, and whether the file was there already.
    """
    # without checksums of all its bytes, nothing tells whether a file is the same
    if there.get(item.file) == item.nbytes and not (isinstance(item, PackedFile) and item.bare):
        try:
            digests, wrong = item.check(dst)
        except NotFound:  # removed at this instant
            return copy_file(item, src, dst), False
        if not wrong:
            dst.adopt(item.file)
            return digests, True
    return copy_file(item, src, dst), False


def copy_file(item: AuditItem, src: Store, dst: Store) -> bytes:
    """Copy a file."""
    unit = item.grid.chunk_nbytes + 4 if isinstance(item, ShardFile) else unit_for(item.nbytes)
    with dst.create(item.file, unit) as out:
        digests, wrong = item.check(src, out)
        if wrong:
            raise _damaged(src, item.file, wrong)
    return digests


def listed(source: Universal) -> list[AuditItem]:
    """All files that a manifest names, the large ones first."""
    for key, doc in source.docs.items():
        if doc.path is not None and (missing := source.missing_shards(doc)):
            raise MissingData(
                f"{missing:,} of the {grid_of(doc).count:,} shards of {key} are missing", hint=_HINT
            )
    packed = () if source.manifest.sidecar is None else _packed(source)
    return sorted([*items(source), *packed], key=lambda item: -item.nbytes)


def _packed(source: Universal) -> list[PackedFile]:
    sidecar, keys = source.sidecar(), list(source.docs)
    blocks: dict[str, list[tuple[Key, Block]]] = {file: [] for file in sidecar.files}
    for file, tensor, block in blocks_of(sidecar):
        blocks[file].append((keys[tensor], block))
    encoded = encoded_files(sidecar, source.manifest.tensors)
    c = sidecar.columns
    bare = {
        sidecar.files[n]
        for n in set(c.file[(c.block_offset == NO_BLOCK) & ~sidecar.tiled].tolist())
    }

    def packed_file(file: str) -> PackedFile:
        try:
            size = source.store.info(file).size
        except NotFound as error:
            names = _names([key for key, _ in blocks[file]])
            raise MissingData(f"{error.message}{names}", hint=_HINT) from error
        if file in encoded:
            return PackedFile(file, size, tuple(_stored(source, file, blocks[file])), bare=False)
        return PackedFile(file, size, tuple(blocks[file]), file in bare)

    return map_io(packed_file, sidecar.files)


def packed_item(source: Universal, file: str) -> PackedFile:
    """One packed file that consists of tiles, with the checksum of each; see `listed`."""
    sidecar, keys = source.sidecar(), list(source.docs)
    blocks = [
        (key := keys[tensor], Block(offset, box.size * source.docs[key].unit, placed=True))
        for offset, (tensor, box) in sorted(sidecar.tiles_in(file).items())
    ]
    size = source.store.info(file).size
    if file in encoded_files(sidecar, source.manifest.tensors):
        return PackedFile(file, size, tuple(_stored(source, file, blocks)), bare=False)
    return PackedFile(file, size, tuple(blocks), bare=False)


def _stored(
    source: Universal, file: str, blocks: Sequence[tuple[Key, Block]]
) -> Iterator[tuple[Key | None, Block]]:
    """The blocks of an encoded file, from those of the plain one: its tiles as they are stored, and its index."""
    image = find_image(source.store, file)
    assert isinstance(image, TileIndex)  # noqa: S101 - it is a packed file
    if reason := image.other_tile((block.offset, block.nbytes) for _, block in blocks):
        raise IntegrityError(f"{source.store.url}/{file}: {reason}", hint=_HINT)
    keys = {block.offset: key for key, block in blocks}
    for number, block in image.stored:
        yield keys[int(image.starts[number])], block
    yield None, image.own_block


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A packed file with checksums of blocks, each of a tensor or of none; `bare` if some extents have none."""

    file: str
    nbytes: int
    blocks: tuple[tuple[Key | None, Block], ...]
    bare: bool
    key: Key | None = None

    def check(self, store: Store, out: FileWriter | None = None) -> tuple[bytes, list[Problem]]:
        """See AuditItem."""
        sums = BlockChecker(self.file, self.blocks)
        for at, part in read_parts(store, self.file, self.nbytes):
            sums.take(at, part)
            if out is not None:
                out.write(part)
        reason = "crc32c differs (block at byte {})"
        damaged = sums.damaged()
        return b"", [
            Problem(
                self.file,
                reason.format(b.offset),
                None if key is None else key.name,
                None if key is None else key.state,
                kind="differs",
            )
            for key, b in damaged
        ]


def _damaged(src: Store, file: str, wrong: Sequence[Problem]) -> UcformatError:
    reasons = [p.reason + (f", chunk {list(p.chunk)}" if p.chunk else "") for p in wrong]
    keys = [Key(p.name, p.state) for p in wrong if p.name is not None and p.state is not None]
    kinds = {p.kind for p in wrong}
    error = (
        ChecksumError
        if "differs" in kinds
        else MissingData
        if "missing" in kinds
        else IntegrityError
    )
    return error(
        f"{src.url}/{file}: {first_names(reasons, _NAMED, '; ')}{_names(keys)}", hint=_HINT
    )


def _names(keys: Sequence[Key]) -> str:
    """` in a (weight), b (weight)`, the first of them."""
    return f" in {first_names(dict.fromkeys(keys), _NAMED)}" if keys else ""


__all__ = ["Copied", "copy"]

record_commits()  # here, because the packages below do not know the catalog


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy.

    Attributes:
        url: the place of the copy.
        id: the checkpoint's id, with another codec that of the new one.
        files: the number of files, without the manifest.
        nbytes: their size in bytes.
        kept: the number of files that were there already.
        kept_nbytes: their size in bytes.
        already: whether the checkpoint was committed there before, so that nothing was done.
    """

    url: str
    id: str
    files: int
    nbytes: int
    kept: int
    kept_nbytes: int
    already: bool = False


def copy(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store,
    overwrite: bool = False,  # noqa: FBT001, FBT002 - as of convert
    workers: int | None = None,
    *,
    with_bases: bool = False,
    codec: Literal["blosc", "none"] | None = None,
    on: str = "threads",
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Copy a universal checkpoint, arrays or packed, to another place, and commit it there under the same id.

    Every byte is compared with its checksum. An interrupted copy leaves nothing that opens; called
    again it continues, and keeps intact files. If the same checkpoint is committed there already,
    nothing is done. A catalog that knows the checkpoint records the new location. Memory: less than
    64 MiB for each worker, whatever the sizes of the files.

    Args:
        src: a checkpoint, or its path, url or reference.
        dst: the path, url or store of the copy.
        overwrite: replace another checkpoint that is committed at `dst`; it stays whole until the
            copy is. If the same one is there, its files are compared with their checksums, and
            damaged ones are copied again.
        workers: files copied at once (default: one for each core; for object stores eight at
            least).
        with_bases: copy the checkpoints beside the source on which it is based, too, if they are
            not beside the copy. A base that is in another folder stays there, and the copy needs
            it, too.
        codec: write the arrays anew with this codec, `blosc` or `none`. The result is another
            checkpoint with the same content: it has an id of its own, and no signature (default: the
            bytes of the files are copied).
        on: where files are copied, as for `convert`.
        progress: called with the bytes done and the bytes in all.

    Raises:
        NotFinished: this process has done its part, and another one commits.
        IntegrityError: the source is damaged; nothing is committed.
        Conflict: another checkpoint is committed at `dst`, or the source was replaced in the
            meantime.
        UnsupportedError: the source is not a universal checkpoint, or is virtual; or without
            `with_bases`, it is based on one that is not beside the copy; or with `codec`, it has
            tensors in packed files.
        UsageError: the source is a view.
    """
    check_choice("codec", codec, (None, "blosc", "none"))
    options = WriteOptions(workers=workers, progress=progress, where=Where.parse(on))
    ck = src if isinstance(src, Checkpoint) else open_reference(src)
    source = _universal(ck)
    store = as_store(dst)
    if codec is not None:
        coded = None if codec == "none" else codec
        arguments = {"codec": coded, "overwrite": overwrite, "workers": workers}
        return _recode(ck, store, **arguments, on=on, progress=progress)
    data, _ = source.store.read_versioned(MANIFEST)
    if not _is_same(parse_manifest(data, f"{source.store.url}/{MANIFEST}"), source.manifest):
        raise _replaced(source)
    # of one that cannot be read, `begin` describes the fault
    here = find_manifest(store, UcformatError)
    if here is not None and not overwrite and _is_same(here, source.manifest):
        return _finish_committed(source, store)
    if here is not None and not overwrite and here.id == source.manifest.id:
        raise Conflict(
            f"{store.url} already holds the checkpoint {here.id} in another form: one of the two "
            "was materialized",
            hint="pass overwrite=True (--overwrite) to replace it",
        )
    _put_bases(source, store, options, with_bases=with_bases)
    try:
        return _copy(ck, source, store, data, options, overwrite=overwrite)
    except Conflict:
        here = None if overwrite else find_manifest(store, UcformatError)
        # another process copied it at the same time
        if here is not None and _is_same(here, source.manifest):
            return _finish_committed(source, store)
        raise
    except UcformatError as error:
        if _is_gone(source):  # the replacement removed the files that are read here
            raise _replaced(source) from error
        raise


def _recode(ck: Checkpoint, store: Store, **arguments: Any) -> Copied:
    """Write a checkpoint of arrays with another codec, and otherwise as it is."""
    if is_packed(ck):
        raise UnsupportedError(
            f"{ck.url} has tensors in packed files, of which there are no copies with another codec",
            hint="`ucp materialize SRC DST --codec blosc` writes it as arrays",
        )
    grid = ck.manifest.grid
    sizes = () if grid is None else (grid.chunk_bytes, grid.shard_bytes)
    done = materialize(ck, store, *sizes, **arguments)
    written = _sizes(store, done.manifest).values()
    return Copied(store.url, done.id, len(written), sum(written), 0, 0)


def _universal(ck: Checkpoint) -> Universal:
    source = ck.universal
    if source is None:
        raise UnsupportedError(
            f"{ck.url} is a checkpoint of {ck.kind}, which has no checksums to copy it by",
            hint="`ucp convert SRC DST` makes a universal checkpoint of it at another place",
        )
    if ck.viewed:
        raise UsageError(
            f"{ck.url} is opened through a view, which has no files to copy",
            hint="copy the checkpoint itself, or convert the view: `ucp convert SRC DST --view …`",
        )
    sidecar = source.manifest.sidecar
    if sidecar is not None and (sidecar.roots or sidecar.sources):
        raise UnsupportedError(
            f"{ck.url} is virtual: the bytes of its tensors are in files of another checkpoint",
            hint="`ucp materialize SRC DST` writes it as arrays at another place",
        )
    return source


def _put_bases(source: Universal, store: Store, options: WriteOptions, *, with_bases: bool) -> None:
    """Have the bases of a checkpoint where its copy expects them, and those of these."""
    missing = missing_bases(source, store.url, with_bases=with_bases)
    for place, base in missing.items():
        if url_of_base(store.url, place) == url_of_base(store.url, store.url):
            raise UsageError(
                f"at {store.url} the copy would read the checkpoint {base.manifest.id}, on which it "
                "is based",
                hint="choose another name for the copy",
            )
    for place, base in reversed(missing.items()):  # the bases of a base first
        copy(Checkpoint(base), place, workers=options.workers)


def missing_bases(source: Universal, home: str, *, with_bases: bool) -> dict[str, Universal]:
    """The bases that are to be copied for a copy of a checkpoint at `home`, by their new places.

    Raises:
        UnsupportedError: one is not where the copy expects it, and is not to be copied.
        Conflict: another checkpoint is, or is to be, where one is to be copied.
    """
    missing: dict[str, Universal] = {}
    _find_missing(source, home, missing, with_bases=with_bases)
    return missing


def _find_missing(
    source: Universal, home: str, missing: dict[str, Universal], *, with_bases: bool
) -> None:
    for number, doc in enumerate(source.manifest.bases):
        place = place_of_base(home, doc.url)
        there = find_manifest(open_store(place), UcformatError)
        if there is not None and there.id == doc.id:
            continue
        if not with_bases or sibling_name(doc.url) is None:
            raise UnsupportedError(
                f"{source.store.url} is based on the checkpoint {doc.id}, which the copy would read "
                f"at {place}, and it is not there",
                hint="with_bases=True (--with-bases) copies it, too; `ucp materialize SRC DST` "
                "writes the checkpoint whole at another place",
            )
        planned = missing[place].manifest if place in missing else there
        if planned is not None and planned.id != doc.id:
            raise Conflict(
                f"{place}, where the copy would read its base {doc.id}, is the place of another "
                f"checkpoint, {planned.id}",
                hint="copy it to another folder",
            )
        base = source.bases.opened(number)  # which refuses loops
        assert isinstance(base, Universal)  # noqa: S101 - only a universal checkpoint is a base
        missing.pop(place, None)  # so that it comes before all that are based on it
        missing[place] = base
        _find_missing(base, place, missing, with_bases=True)


def _protect_bases(manifest: Manifest, store: Store) -> None:
    """Record beside the bases of a copy that it needs them."""
    for doc in manifest.bases:
        place = place_of_base(store.url, doc.url)
        attempt = read_manifest(open_store(place))[0].attempt
        need_base((place, frozenset((attempt,))), doc.id, manifest.id, store.url)


def _is_same(manifest: Manifest, other: Manifest) -> bool:
    """Whether two manifests are of the same checkpoint in the same form."""
    return (manifest.id, manifest.attempt) == (other.id, other.attempt)


def _is_gone(source: Universal) -> bool:
    """Whether the place of the source holds another checkpoint now, or none."""
    try:
        return not _is_same(read_manifest(source.store)[0], source.manifest)
    except NotACheckpoint:
        return True
    except UcformatError:  # unknown
        return False


def _replaced(source: Universal) -> Conflict:
    return Conflict(
        f"the checkpoint {source.manifest.id} at {source.store.url} was replaced or deleted "
        "since it was opened",
        hint="run it again to copy the checkpoint that is there now",
    )


def _finish_committed(source: Universal, store: Store) -> Copied:
    """Do what a process that was killed after its commit may have left undone."""
    settle(store)
    copy_document(source.store, store, source.manifest.id)
    copy_signature(source, store)
    announce(store.url, source.manifest)
    return Copied(store.url, source.manifest.id, 0, 0, 0, 0, already=True)


def _copy(
    ck: Checkpoint,
    source: Universal,
    store: Store,
    data: bytes,
    options: WriteOptions,
    *,
    overwrite: bool,
) -> Copied:
    manifest = source.manifest
    plan = {"copy": manifest.id, "attempt": manifest.attempt}
    needs = [doc.url for doc in manifest.bases]
    attempt = options.where.begin(
        lambda: begin(
            store,
            plan,
            overwrite=overwrite,
            name=manifest.attempt,
            keeps=manifest.id,
            needs=needs,
        )
    )
    _protect_bases(manifest, store)
    before = None if attempt.replaces is None else attempt.replaces[0]
    if (
        before is not None
        and before.attempt == manifest.attempt
        and not _has_equal_files(before, manifest)
    ):
        raise Conflict(
            f"{store.url} holds the checkpoint {before.id}, which has different files with the "
            "same names",
            hint="choose another place, or delete that checkpoint first",
        )
    with CopyJob(ck, store) as job:
        if attempt.began is None:
            job.resume()
        if not run_job(
            job,
            options.where,
            options.workers or workers_for(source.store, store),
            options.progress,
        ):
            raise NotFinished(f"this part of {store.url} is copied; another process commits it")
        copied = _check_digests(job)
    _must_be_there(store, manifest, job.files)
    check_unchanged(source.store, "nothing was committed")
    if before is not None and _is_same(before, manifest):
        _finish_committed(source, store)
    else:
        committed = commit(store, attempt, manifest, data)
        if committed.id != manifest.id:  # written by the plan of this checkpoint, under another id
            raise Conflict(
                f"{store.url} was committed by another writer (checkpoint {committed.id}) in the "
                "meantime",
                hint="that checkpoint is complete, and has the same tensors; choose another place",
            )
        copy_document(source.store, store, manifest.id)
        copy_signature(source, store)
    if job.recorded or options.where != HERE:
        discard_finished(store, attempt.id)
    return copied


def _has_equal_files(manifest: Manifest, other: Manifest) -> bool:
    """Whether all files are the same, by their digests."""
    return all(
        getattr(manifest, k) == getattr(other, k)
        for k in ("tensors", "objects", "assets", "sidecar")
    )


def _check_digests(job: CopyJob) -> Copied:
    """Check that the shards together match the digests of the arrays; intact ones with other content are copied."""
    source, store, shards = job.source, job.store, job.shards
    for key in [Key(str(p.name), str(p.state)) for p in wrong_digests(source, shards)]:
        for item in [i for i in job.kept if isinstance(i, ShardFile) and i.key == key]:
            shards[key][item.shard] = copy_file(item, source.store, store)
            job.kept.remove(item)
    for problem in wrong_digests(source, shards):
        raise IntegrityError(
            f"{source.store.url}/{problem.file}: {problem.reason}, in {problem.name} "
            f"({problem.state})",
            hint=(
                "restore the array from another copy of the checkpoint; nothing is committed at "
                "the destination"
            ),
        )
    kept_nbytes = sum(i.nbytes for i in job.kept)
    return Copied(store.url, source.manifest.id, job.count, job.total, len(job.kept), kept_nbytes)


def _sizes(store: Store, manifest: Manifest) -> dict[str, int]:
    """The sizes of the files in the folders of an attempt."""
    return {i.key: i.size for folder in folders_of(manifest.attempt) for i in store.list(folder)}


def _must_be_there(store: Store, manifest: Manifest, files: Sequence[AuditItem]) -> None:
    """Raise Conflict if files were removed: by another copy of the checkpoint that lost to a third one."""
    there = _sizes(store, manifest)
    inside = tuple(f"{folder}/" for folder in folders_of(manifest.attempt))
    for item in files:
        if item.file.startswith(inside) and there.get(item.file) != item.nbytes:
            raise Conflict(
                f"{store.url}/{item.file} was removed while the checkpoint was copied",
                hint="run it again",
            )
