"""What a job will cost, before it runs: its tasks, the bytes that it reads and writes, its requests, and its time."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError, check_choice
from ucformat.exporters.base import Span
from ucformat.format.shard import BAND_BYTES
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.compact import arrays_codec, find_anchor, is_compact
from ucformat.jobs.convert import based_tensors, chosen, lossy_tensors
from ucformat.jobs.copy import CopyJob, missing_bases
from ucformat.jobs.increments import Comparison, open_base
from ucformat.jobs.opening import by_outermost, left_inside, tree_of, try_open, unchanged
from ucformat.jobs.patch import nothing_alike
from ucformat.jobs.patch_files import TilesJob, TilesPlan
from ucformat.jobs.run import workers_for
from ucformat.jobs.shards import NO_ATTEMPT, ShardJob, WriteOptions
from ucformat.jobs.verify import VerifyJob
from ucformat.jobs.weight_files import plan_files
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.references import open_reference
from ucformat.storage.concurrency import THREADS
from ucformat.storage.profiles import profile_of
from ucformat.storage.upload import part_size, unit_for
from ucformat.storage.url import as_strings, open_store
from ucformat.storage.wrappers import RecordingStore, WatchedStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.export_files import ExportJob
    from ucformat.jobs.inputs import InputBox
    from ucformat.jobs.listing import ListedTree
    from ucformat.reading.plan import Verify
    from ucformat.storage.base import Info, Store


# What registering trees will cost, from opening a sample of their checkpoints: what is read depends
# on the content.
#
# Folders are of one kind if they have files of the same names, apart from numbers. Of each kind
# some are opened, spread over the tree, and stand for the others.


# folders that are opened of each kind, and kinds; rare ones are taken together
_OPENED, _KINDS = (4, 8)
_PAGE = 1000  # files that one request lists
_NUMBER = re.compile(r"\d+")


class _Folder(NamedTuple):
    """A folder that looks like a checkpoint, those inside of it, and how many it stands for."""

    key: str
    inside: Sequence[str]
    weight: float


@dataclass
class _Total:
    """What was counted, or is estimated."""

    tasks: float = 0
    files: float = 0
    requests: float = 0
    nbytes: float = 0
    processor: float = 0  # seconds

    def add(self, other: _Total, weight: float = 1) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + weight * value)


class _CountingStore(RecordingStore):
    """Also counts requests that read nothing."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.others = 0

    def info(self, key: str) -> Info:
        self.others += 1
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[Info]:
        self.others += 1
        for number, info in enumerate(self.inner.list(prefix), 1):
            self.others += number % _PAGE == 0
            yield info


def estimate_register(
    places: str | PathLike[str] | Iterable[str | PathLike[str]],
    catalog: Catalog | None,
    *,
    rescan: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Cost:
    """Estimate what `register` of trees costs: opens a sample of their checkpoints, and writes nothing.

    Args:
        catalog: the catalog, whose unchanged checkpoints are not opened (None: there is none yet).

    Raises:
        NotFound: one of the places is empty, or has no checkpoint.
    """
    total, sampled, seconds = _Total(), 0, 0.0
    unmeasured: list[str] = []
    for place in as_strings(places):
        store, begun = _CountingStore(open_store(place)), time.time()
        infos = list(store.list())
        tree = tree_of(store, infos, begun)
        recorded = {} if rescan or catalog is None else unchanged(catalog, tree)
        folders = [folder for folder in tree.folders if tree.url(folder) not in recorded]
        counted, opened = _sample(tree, folders, _names(infos, folders), options)
        counted.add(_counted([store]))
        threads = THREADS if store.costs.parallel else 1
        tree_seconds = seconds_at(store, round(counted.requests), round(counted.nbytes), threads)
        if tree_seconds is None:
            unmeasured.append(store.url)
        seconds += (tree_seconds or 0) + counted.processor
        sampled += opened
        total.add(counted)
    return Cost(
        tasks=round(total.tasks),
        files=round(total.files),
        bytes_read=round(total.nbytes),
        bytes_written=0,
        requests=round(total.requests),
        seconds=None if unmeasured else seconds,
        unmeasured=tuple(unmeasured),
        sampled=sampled,
    )


def _names(infos: Iterable[Info], folders: Iterable[str]) -> dict[str, frozenset[str]]:
    """The names of the files in each folder, without their numbers."""
    names: dict[str, set[str]] = {folder: set() for folder in folders}
    plain = cache(lambda name: _NUMBER.sub("#", name))  # most names are in every step
    for info in infos:
        folder, _, name = info.key.rpartition("/")
        if folder in names:
            names[folder].add(plain(name))
    return {folder: frozenset(plain_names) for folder, plain_names in names.items()}


def _sample(
    tree: ListedTree,
    folders: Iterable[str],
    names: Mapping[str, frozenset[str]],
    options: Mapping[str, Any] | None,
) -> tuple[_Total, int]:
    """What it costs to open folders, and how many were opened to find out.

    Folders inside of others are opened after these, if they are not part of them.
    """
    total, opened = _Total(), 0
    level = [_Folder(key, inside, 1) for key, inside in by_outermost(folders).items()]
    while level:
        below: list[_Folder] = []
        for kind in _kinds(level, names):
            try_open(tree.url(kind[0].key), options)  # imports modules, which is not counted
            number = min(len(kind), _OPENED)
            weight = sum(folder.weight for folder in kind) / number
            for i in range(number):
                # those in the middle of equal parts of the kind
                folder = kind[(2 * i + 1) * len(kind) // (2 * number)]
                stores: list[_CountingStore] = []

                def watch(store: Store, stores: list[_CountingStore] = stores) -> WatchedStore:
                    stores.append(_CountingStore(store))
                    return WatchedStore(stores[-1])

                begun = time.thread_time()
                outcome = try_open(tree.url(folder.key), options, watch)
                spent = time.thread_time() - begun
                counted = _counted(stores)
                counted.tasks, counted.processor = 1, spent
                total.add(counted, weight)
                opened += 1
                left = by_outermost(left_inside(folder.key, outcome, folder.inside))
                below += [_Folder(key, inside, weight) for key, inside in left.items()]
        level = below
    return total, opened


def _kinds(folders: Iterable[_Folder], names: Mapping[str, frozenset[str]]) -> list[list[_Folder]]:
    """The folders by kind; the rare kinds are one."""
    kinds: dict[frozenset[str], list[_Folder]] = {}
    for folder in folders:
        kinds.setdefault(names[folder.key], []).append(folder)
    by_size = sorted(kinds.values(), key=len, reverse=True)
    rare = [folder for kind in by_size[_KINDS - 1 :] for folder in kind]
    return [*by_size[: _KINDS - 1], *([rare] if rare else [])]


def _counted(stores: Iterable[_CountingStore]) -> _Total:
    """What was read through stores."""
    reads = [(store.url, read) for store in stores for read in store.reads]
    files = len({(url, read.file) for url, read in reads})
    others = sum(store.others for store in stores)
    return _Total(0, files, len(reads) + others, sum(read.nbytes for _, read in reads))


__all__ = ["Cost", "estimate", "estimate_export", "estimate_shards", "seconds_at"]

#: The jobs that take an argument.
_TAKEN_BY = {
    "base": ("convert", "patch"),
    "codec": ("convert", "materialize", "compact"),
    "encode": ("convert",),
    "fold": ("compact",),
}
_READ = 4 << 20  # bytes that copy and verify read at once


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job will do.

    Attributes:
        tasks: into which it is cut.
        files: that are written, or without a destination read.
        bytes_read: from the source.
        bytes_written: to the destination, without metadata.
        requests: reads and writes; of local files, system calls.
        seconds: about how long it takes with its workers in one process; None if `ucp doctor` has
            not measured the places in `unmeasured`.
        unmeasured: the places whose speed is unknown.
        sampled: how many tasks were run to estimate all of this (None: none; it was computed).
        encoded: whether a codec or patches make fewer bytes of `bytes_written`, which are those of the elements.
        referenced: the tensors that equal those of the base by recorded fingerprints, and are not written.
        bytes_referenced: their bytes.
        unread: the tensors that must be read to tell whether they equal those of the base; they are counted as
            written.
    """

    tasks: int
    files: int
    bytes_read: int
    bytes_written: int
    requests: int
    seconds: float | None
    unmeasured: tuple[str, ...]
    sampled: int | None = None
    encoded: bool = False
    referenced: int = 0
    bytes_referenced: int = 0
    unread: int = 0

    def on_base(self, comparison: Comparison) -> Cost:
        """The cost where tensors are compared with those of a base."""
        return replace(
            self,
            referenced=len(comparison.equal),
            bytes_referenced=sum(doc.nbytes for doc in comparison.equal),
            unread=len(comparison.unread),
        )


def estimate(
    job: Literal["convert", "copy", "materialize", "patch", "compact", "verify"],
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | None = None,
    states: str | Iterable[str] | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    workers: int | None = None,
    *,
    weights: Literal["safetensors"] | None = None,
    base: str | PathLike[str] | Checkpoint | None = None,
    codec: Literal["blosc", "none"] | None = None,
    encode: Mapping[str, str] | None = None,
    fold: bool = False,
    verify: bool = True,
    with_bases: bool = False,
) -> Cost:
    """Estimate what a job costs; reads metadata alone, and writes nothing.

    Args:
        job: its name.
        src: a checkpoint, or its path, url or reference.
        dst: the destination, for `convert`, `copy` and `patch`; for `materialize` and `compact` the source's place by
            default.
        states: as for `convert` and `patch`.
        chunk_bytes: as for `convert`.
        shard_bytes: as for `convert`.
        workers: as for `convert`.
        weights: as for `convert`.
        base: as for `convert` and `patch`.
        codec: as for `convert` and `compact`.
        encode: as for `convert`.
        fold: as for `compact`.
        verify: as for `convert`.
        with_bases: as for `copy`.

    Raises:
        UsageError: there is no such job, or it has no destination, or no base; or as the job itself.
        UnsupportedError: `copy` of a checkpoint that is not universal; or as the job itself.
    """
    ck = src if isinstance(src, Checkpoint) else open_reference(src)
    check_choice("job", job, ("convert", "copy", "materialize", "patch", "compact", "verify"))
    for name, value in (("base", base), ("codec", codec), ("encode", encode), ("fold", fold)):
        if value and job not in _TAKEN_BY[name]:
            raise UsageError(f"{job} takes no {name}", hint=f"leave out {name}=")
    if dst is None and job in ("convert", "copy", "patch"):
        raise UsageError(f"{job} needs a destination")
    if job == "verify":
        checks = VerifyJob(ck)
        nbytes = sum(c.nbytes for c in checks.checks)
        calls = sum(math.ceil(c.nbytes / _READ) for c in checks.checks)
        return _cost(
            [(ck.store, calls, nbytes)], None, (), workers, (checks.count, len(checks.checks))
        )
    store = open_store(ck.home if dst is None else dst)
    if job == "copy":
        if ck.universal is None:
            raise UnsupportedError(
                f"{ck.url} is a checkpoint of {ck.kind}, which is not copied", hint="convert it"
            )
        missing = missing_bases(ck.universal, store.url, with_bases=with_bases)
        copied = [(ck, store), *((Checkpoint(b), open_store(at)) for at, b in missing.items())]
        reads, sizes = list[_Reads](), list[int]()
        for original, place in copied:
            files = [item.nbytes for item in CopyJob(original, place).files]
            reads.append((original.store, sum(math.ceil(n / _READ) for n in files), sum(files)))
            sizes += files
        return _cost(reads, store, sizes, workers)
    if job == "compact":
        if is_compact(ck, store if dst is not None else None, fold=fold, codec=codec):
            return _cost((), store, (), workers)
        codec = arrays_codec(ck, codec)
        base = find_anchor(ck) if fold else None
    compressed = None if codec == "none" else codec
    options = WriteOptions(
        *(chunk_bytes, shard_bytes, workers), verify=verify, codec=compressed, encode=encode or {}
    )
    infos = chosen(ck, None if states is None else as_strings(states))
    if job == "patch" or fold:
        if base is None:
            raise UsageError("patch needs a base", hint="give a universal checkpoint: base=")
        return _of_patch(ck, infos, base, store, options)
    return _of_arrays(ck, infos, base, store, options, weights if job == "convert" else None)


def _of_arrays(
    ck: Checkpoint,
    infos: list[TensorInfo],
    base: str | PathLike[str] | Checkpoint | None,
    store: Store,
    options: WriteOptions,
    weights: Literal["safetensors"] | None,
) -> Cost:
    """What a conversion costs."""
    check_choice("weights", weights, (None, "safetensors"))
    lossy = lossy_tensors(ck, infos, options, weights)
    comparison = Comparison()
    if base is not None:
        comparison = open_base(base, store.url).compare(
            based_tensors(infos, weights), ck.metadata.fingerprints
        )
        equal = {Key(doc.name, doc.state) for doc in comparison.equal}
        infos = [i for i in infos if i.key not in equal]
    planned = plan_files(ck, infos, NO_ATTEMPT, weights)
    in_files = lossy | (set() if planned is None else {*planned.tensors})
    arrays = [i for i in infos if i.key not in in_files]
    with ShardJob(ck, store, NO_ATTEMPT, arrays, options) as shards:
        reads, sizes = _of_shards(shards)
    if lossy:
        tiles = TilesPlan(infos, {}, {}, [i.key for i in arrays])
        with TilesJob(ck, None, store, NO_ATTEMPT, tiles, options) as job:
            more = _of_tiles(job)
            reads, sizes = reads + more[0], sizes + more[1]
    elif planned is not None:
        for file in planned.files:
            reads.append((ck.store, math.ceil(file.nbytes / BAND_BYTES), file.nbytes))
            sizes.append(file.nbytes)
    cost = _cost(reads, store, sizes, options.workers).on_base(comparison)
    return replace(cost, encoded=bool(options.codec or lossy))


def _of_patch(
    ck: Checkpoint,
    infos: list[TensorInfo],
    base: str | PathLike[str] | Checkpoint,
    store: Store,
    options: WriteOptions,
) -> Cost:
    """What a patch costs; tensors of which no fingerprint is recorded are read once more, to compare them."""
    opened = base if isinstance(base, Checkpoint) else open_reference(base)
    based = open_base(opened, store.url)
    comparison = based.compare(infos, ck.metadata.fingerprints)
    referenced, different = (
        {Key(doc.name, doc.state): doc for doc in docs}
        for docs in (comparison.equal, comparison.different)
    )
    unread = {i.key: doc for i in comparison.unread if (doc := based.alike(i)) is not None}
    if not (referenced or different or unread):
        raise nothing_alike(ck, opened)
    plan = TilesPlan(infos, referenced, different | unread)
    with TilesJob(ck, opened, store, NO_ATTEMPT, plan, options) as job:
        reads, sizes = _of_tiles(job)
    cost = _cost(reads, store, sizes, options.workers).on_base(comparison)
    return replace(cost, encoded=True)


def estimate_shards(job: ShardJob) -> Cost:
    """Estimate what a job costs that writes shards; reads metadata alone, and writes nothing."""
    reads, sizes = _of_shards(job)
    cost = _cost(reads, job.store, sizes, job.options.workers)
    return replace(cost, encoded=job.options.codec is not None)


def estimate_export(job: ExportJob, workers: int | None = None) -> Cost:
    """Estimate what an export costs; reads metadata alone, and writes nothing."""
    reads: list[_Reads] = []
    sizes = [0 if file.link else file.nbytes for file in job.target.files]
    for file in job.target.files:
        for part in () if file.link else file.parts():
            if isinstance(part, Span):
                reads += _planned(
                    [job.input.within(info, piece.box) for info, piece in part.pieces]
                )
    return _cost(reads, job.store, sizes, workers)


#: A place, and the requests and the bytes that are read from it.
_Reads = tuple["Store", int, int]


def _of_shards(job: ShardJob) -> tuple[list[_Reads], list[int]]:
    """What the shards of a job read, and the sizes of their files."""
    reads: list[_Reads] = []
    sizes = []
    for array, shard in map(job.shard, range(job.count)):
        once = _planned(job.boxes(array, array.grid.box(shard)))
        times = job.times_read(array)
        reads += ((place, calls * times, nbytes * times) for place, calls, nbytes in once)
        sizes.append(array.grid.file_nbytes(shard))
    return reads, sizes


def _of_tiles(job: TilesJob) -> tuple[list[_Reads], list[int]]:
    """What the files of tiles read, and the bytes of their elements."""
    reads: list[_Reads] = []
    for placed in (placed for boxes in job.files for placed in boxes):
        inputs = job.inputs[: 1 + (placed.info.key in job.plan.bases)]
        reads += _planned([input_.within(placed.info, placed.box) for input_ in inputs])
    return reads, [job.nbytes(task) for task in range(job.count)]


def _planned(boxes: Iterable[InputBox]) -> Iterator[_Reads]:
    """What is read for boxes."""
    for input_box in boxes:
        store = input_box.input.checkpoint.store
        costs = store.costs
        # as it is read, band by band
        costs = replace(costs, block=0, request=min(costs.request, BAND_BYTES))
        piece = Piece(input_box.box, 0, row_major(input_box.box.shape))
        verify: Verify = "whole" if input_box.input.verify else "never"
        plan = make_plan(
            [ReadItem(input_box.info, input_box.planned, [(0, piece)])], verify, costs
        ).through(store)
        yield store, plan.ranges, plan.bytes_read


def _puts(store: Store, nbytes: int) -> int:
    """The requests that write a file."""
    part = part_size(unit_for(nbytes)) if store.costs.parallel else BAND_BYTES
    return 1 if nbytes <= part else 2 + math.ceil(nbytes / part)


def seconds_at(
    store: Store, calls: int, nbytes: int, threads: int, *, writing: bool = False
) -> float | None:
    """How long requests take, by what `ucp doctor` has measured of the place; None if it has not."""
    profile = profile_of(store.url)
    if profile is None:
        return None
    speed = (profile.write_mb_per_s if writing else None) or profile.read_mb_per_s
    lanes = threads if store.costs.parallel else 1  # one reader of a disk gets most of its speed
    return calls * profile.latency_ms / 1e3 / threads + nbytes / 1e6 / speed / lanes


def _cost(
    reads: Sequence[_Reads],
    store: Store | None,
    sizes: Sequence[int],
    workers: int | None,
    counts: tuple[int, int] | None = None,
) -> Cost:
    """The cost of a job.

    Args:
        counts: the tasks and the files, if each task does not write a file.
    """
    tasks, files = counts or (len(sizes), len(sizes))
    of_place: dict[Store, tuple[int, int]] = {}
    for place, calls, nbytes in reads:
        before = of_place.get(place, (0, 0))
        of_place[place] = before[0] + calls, before[1] + nbytes
    moved = [(place, *totals, False) for place, totals in of_place.items()]
    if store is not None:
        moved.append((store, sum(_puts(store, n) for n in sizes), sum(sizes), True))
    threads = min(workers or workers_for(*(place for place, *_ in moved)), max(1, tasks))
    seconds: list[float] = []
    unmeasured: list[str] = []
    for place, calls, nbytes, writing in moved:
        took = seconds_at(place, calls, nbytes, threads, writing=writing)
        if took is None:
            unmeasured.append(place.url)
        else:
            seconds.append(took)
    return Cost(
        tasks,
        files,
        sum(nbytes for *_, nbytes, writing in moved if not writing),
        sum(sizes),
        sum(calls for _, calls, *_ in moved),
        None if unmeasured else sum(seconds),
        tuple(dict.fromkeys(unmeasured)),
    )
