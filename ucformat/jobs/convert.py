"""Materialises any checkpoint as a universal one: a task for each shard, each idempotent, then one commit."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from typing import TYPE_CHECKING, Any

from ucformat._version import __version__
from ucformat.checkpoint import Checkpoint, group_docs, open_checkpoint
from ucformat.errors import NotFound, UsageError
from ucformat.format.chunking import Grid
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.digest import bytes_digest, tensor_digest
from ucformat.format.execute import execute
from ucformat.format.names import folder_names
from ucformat.format.shard import check_shard, write_shard
from ucformat.format.zarr_json import array_json, group_json, shard_key
from ucformat.geometry.box import row_major
from ucformat.geometry.plan import Wanted, make_plan
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.run import run as run_tasks
from ucformat.references import open_reference
from ucformat.schema.manifest import FileDoc, LineageDoc, Manifest, TensorDoc
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.format.commit import Attempt
    from ucformat.format.shard import Band
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.storage.base import Store

__all__ = ["convert"]


@dataclass(frozen=True, slots=True)
class _Array:
    """One tensor as it is to be stored."""

    info: TensorInfo
    grid: Grid
    path: str


@dataclass(frozen=True, slots=True)
class _Task:
    """One shard to write."""

    array: _Array
    shard: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.array.grid.box(self.shard).size * self.array.info.itemsize


def convert(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store,
    states: Sequence[str] | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,  # noqa: FBT001, FBT002 - the signature users know
    workers: int | None = None,
    *,
    run: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Write a universal checkpoint of what another holds, and commit it.

    Interrupted at any instant it leaves nothing that opens; called again with the same arguments it continues, and
    reuses the shards that are whole. Memory: less than 64 MiB for each worker, whatever the sizes of the tensors.

    Args:
        src: a checkpoint, or where one lies.
        dst: where the new one is to lie.
        states: which states to take; None for all.
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one is.
        workers: shards written at once (default: one for each core).
        run: the name of the training run, for the catalog; by default the source's, if it says.
        progress: called with the bytes done and the bytes in all.

    Raises:
        Conflict: a checkpoint is committed at `dst` already, or somebody else committed one meanwhile.
    """
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    store = open_store(dst) if isinstance(dst, str | PathLike) else dst
    for what, given in (("chunk_bytes", chunk_bytes), ("shard_bytes", shard_bytes), ("workers", workers)):
        if given is not None and given < 1:
            raise UsageError(f"{what} must be at least 1, not {given}")
    infos = _chosen(source, states)
    plan = _plan_document(source, infos, chunk_bytes, shard_bytes)
    attempt = begin(store, plan, overwrite=overwrite)
    arrays = _arrays(infos, attempt, chunk_bytes, shard_bytes)
    leaves = _write_all(source, store, attempt, arrays, workers, progress)
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        producer=_producer(source),
        run=run or source.manifest.run,
        metrics=source.manifest.metrics,
        config=source.manifest.config,
        step=source.facts.step,
        layout=dict(source.facts.layout),
        groups=group_docs(source.facts),
        lineage=(_lineage(source),),
        aliases={a: n for a, n in source.aliases.items() if any(i.name == n for i in infos)},
        objects=_put(store, f"{attempt.folder('objects')}/objects.json", json.dumps(source.objects, indent=1).encode()),
        assets={
            name: _put(store, f"{attempt.folder('assets')}/{folder}", source.assets[name])
            for name, folder in folder_names(source.assets).items()
        },
        tensors=tuple(_document(a, leaves[a.info.key]) for a in arrays),
    )
    commit(store, attempt, manifest)
    return open_checkpoint(store)


def _chosen(source: Checkpoint, states: Sequence[str] | None) -> list[TensorInfo]:
    infos = [i for i in source.tensors.values() if states is None or i.state in states]
    unknown = set(states or ()) - {i.state for i in infos}
    if unknown:
        known = ", ".join(sorted({k.state for k in source.tensors}))
        raise UsageError(f"{source.url} stores no tensor in state {min(unknown)!r}", hint=f"there are: {known}")
    return infos


def _plan_document(
    source: Checkpoint, infos: Sequence[TensorInfo], chunk_bytes: int | None, shard_bytes: int | None
) -> dict[str, Any]:
    """All that tells this conversion apart from another: the source's files as they are now, tensors and grids."""
    files = [source.store.info(f) for f in source.facts.files]
    return {
        "convert": source.store.url,
        "files": [(f.key, f.size, f.version) for f in files],
        "tensors": [(i.name, i.state, i.dtype, i.shape) for i in infos],
        "grids": (chunk_bytes, shard_bytes),
        "writer": __version__,
    }


def _arrays(
    infos: Sequence[TensorInfo], attempt: Attempt, chunk_bytes: int | None, shard_bytes: int | None
) -> list[_Array]:
    states = folder_names(dict.fromkeys(i.state for i in infos))
    folders = {s: folder_names(i.name for i in infos if i.state == s) for s in states}
    return [
        _Array(
            i,
            Grid.of(i.shape, i.itemsize, chunk_bytes, shard_bytes),
            f"{attempt.folder('data')}/{states[i.state]}/{folders[i.state][i.name]}",
        )
        for i in infos
    ]


def _write_all(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    arrays: Sequence[_Array],
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> dict[Key, dict[tuple[int, ...], bytes]]:
    """Write all metadata, as one task, and every shard, the large ones first; the digests of the shards' chunks."""
    tasks = [_Task(a, s) for a in arrays for s in a.grid.shards()]
    tasks.sort(key=lambda t: -t.nbytes)
    total, done = sum(t.nbytes for t in tasks), 0
    leaves: dict[Key, dict[tuple[int, ...], bytes]] = {a.info.key: {} for a in arrays}

    def work(task: _Task | None) -> bytes:
        if task is not None:
            return _write_shard(source, store, task)
        _write_metadata(store, attempt, arrays)
        return b""

    for task, found in run_tasks(work, [*tasks[:1], None, *tasks[1:]], workers):
        if task is None:
            continue
        leaves[task.array.info.key][task.shard] = found
        done += task.nbytes
        if progress is not None:
            progress(done, total)
    return leaves


def _write_shard(source: Checkpoint, store: Store, task: _Task) -> bytes:
    info, grid = task.array.info, task.array.grid
    key = shard_key(task.array.path, task.shard)
    try:
        if store.info(key).size == grid.file_nbytes(task.shard):
            leaves, damages = check_shard(store, key, grid, task.shard)
            if not damages:  # written by this plan before it was interrupted
                store.adopt(key)
                return leaves
    except NotFound:
        pass
    extents = list(source.source.extents(info.key))

    def fill(band: Band, raw: NDArray[np.uint8]) -> None:
        piece = Piece(band.box, 0, row_major(band.padded))
        execute(make_plan([Wanted(info, extents, [(0, piece)])]), source.store, [raw], [str(info.key)], threads=1)

    return write_shard(store, key, grid, task.shard, fill)


def _write_metadata(store: Store, attempt: Attempt, arrays: Sequence[_Array]) -> None:
    """Put every `zarr.json`: of the group, of each state, of each array."""
    data = attempt.folder("data")
    for folder in dict.fromkeys([data, *(a.path.rsplit("/", 1)[0] for a in arrays)]):
        _put(store, f"{folder}/zarr.json", group_json({}))
    for a in arrays:
        attributes = {"ucformat": {"name": a.info.name, "state": a.info.state}}
        _put(store, f"{a.path}/zarr.json", array_json(a.info.dtype, a.grid, attributes))


def _document(array: _Array, leaves: dict[tuple[int, ...], bytes]) -> TensorDoc:
    """What the manifest says of an array."""
    info, grid = array.info, array.grid
    return TensorDoc(
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=info.shape,
        chunk=grid.chunk,
        shard=grid.shard,
        nbytes=info.nbytes,
        digest=tensor_digest(info.dtype, grid, leaves),
        path=array.path,
    )


def _put(store: Store, key: str, data: bytes) -> FileDoc:
    with store.create(key) as out:
        out.write(data)
    return FileDoc(path=key, nbytes=len(data), digest=bytes_digest(data))


def _producer(source: Checkpoint) -> dict[str, str]:
    engine = {f"engine.{k}": v for k, v in source.facts.engine.items()}
    return {"ucformat": __version__, "python": platform.python_version(), **engine}


def _lineage(source: Checkpoint) -> LineageDoc:
    return LineageDoc(kind="convert", url=source.home, id=source.id, engine=dict(source.facts.engine))
