"""Reads a universal checkpoint: its manifest as facts and extents, with no other metadata file touched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, NotFound
from ucformat.facts import Facts
from ucformat.format.chunking import Grid
from ucformat.format.commit import MANIFEST, read_manifest
from ucformat.format.digest import bytes_digest
from ucformat.format.mounted import MountedStore
from ucformat.format.zarr_json import shard_key
from ucformat.geometry.tensor import Key, Roster, TensorInfo
from ucformat.storage.watched import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Tiles
    from ucformat.schema.manifest import FileDoc, Manifest, TensorDoc
    from ucformat.storage.base import Store

__all__ = ["Universal", "grid_of"]

_MOST_DIMS, _LARGEST = 64, 1 << 62  # torch's own limit, and what offsets can say
_LARGE = 256 << 20  # bytes; _MANY and _TOO_MANY are numbers of shards
_MANY = 10_000
_TOO_MANY = 10_000_000


def grid_of(doc: TensorDoc) -> Grid:
    """The grid of an array; IntegrityError where the manifest contradicts itself."""
    ok = doc.chunk is not None and doc.shard is not None and len(doc.shape) == len(doc.chunk) == len(doc.shard)
    if not ok or any(s % c for s, c in zip(doc.shard or (), doc.chunk or (), strict=True)):
        raise IntegrityError(f"{doc.name} ({doc.state}): the manifest gives it an impossible chunk grid")
    info = TensorInfo(doc.name, doc.state, doc.dtype, doc.shape)
    if info.nbytes != doc.nbytes:
        raise IntegrityError(f"{info.key}: the manifest says {doc.nbytes} bytes, its shape has {info.nbytes}")
    return Grid(doc.shape, doc.chunk or (), doc.shard or (), info.itemsize)


class Universal:
    """An opened universal checkpoint."""

    kind = "ucformat"

    def __init__(
        self, store: Store, roots: Callable[[], Sequence[str]] = tuple, manifest: Manifest | None = None
    ) -> None:
        """Open what is committed in a store, by this manifest if it is known.

        `roots` are the places in which files of others may be read.
        """
        watching = store if isinstance(store, Watched) else Watched(store)
        self.store: Store = watching
        self.manifest = manifest or read_manifest(watching)[0]
        sidecar = self.manifest.sidecar
        if sidecar is not None and sidecar.roots:
            watching.inner = MountedStore(watching.inner, sidecar, roots)
        self.docs: Mapping[Key, TensorDoc] = {Key(d.name, d.state): d for d in self.manifest.tensors}
        if len(self.docs) != len(self.manifest.tensors):
            raise IntegrityError(f"{store.url}: the manifest lists a tensor twice")
        for doc in self.manifest.tensors:
            if len(doc.shape) > _MOST_DIMS or max(doc.shape, default=0) > _LARGEST:
                raise IntegrityError(f"{store.url}: the manifest gives {doc.name} ({doc.state}) an impossible shape")
        infos = tuple(TensorInfo(d.name, d.state, d.dtype, d.shape) for d in self.manifest.tensors)
        m = self.manifest
        self.facts = Facts(
            roster=Roster(infos, {name: i for i, g in enumerate(m.groups) for name in g.params}),
            aliases=m.aliases,
            assets=tuple(m.assets),
            groups=tuple({"params": list(g.params), **g.options} for g in m.groups),
            step=m.step,
            layout=m.layout,
            engine={k.removeprefix("engine."): v for k, v in m.producer.items() if k.startswith("engine.")},
            files=(MANIFEST,),
        )
        self._numbers = {key: n for n, key in enumerate(self.docs)}
        self._sidecar: Sidecar | None = None

    def objects(self) -> dict[str, Any]:
        """The non-tensor values."""
        doc = self.manifest.objects
        if doc is None:
            return {}
        try:
            found = json.loads(self.read_file(doc))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{self.store.url}/{doc.path} is no JSON document: {str(error)[:200]}") from error
        if not isinstance(found, dict):
            raise IntegrityError(f"{self.store.url}/{doc.path} holds no objects by name")
        return found

    def read_file(self, doc: FileDoc) -> bytes:
        """A file that the manifest lists; IntegrityError where it is not what was committed."""
        try:
            data = self.store.read(doc.path)
        except NotFound as error:
            raise MissingData(error.message) from error
        if bytes_digest(data) != doc.digest:
            raise IntegrityError(
                f"{self.store.url}/{doc.path} is not what was committed (its digest differs)",
                hint="restore it from another copy of the checkpoint",
            )
        return data

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """See Readable."""
        doc = self.docs[key]
        if doc.path is None:
            yield from self.sidecar().extents(self._numbers[key], within)
            return
        grid = grid_of(doc)
        if not doc.nbytes:
            return
        self._check_large(doc, grid)
        for shard in grid.shards(within):
            yield grid.tiles(shard, shard_key(doc.path, shard))

    def _check_large(self, doc: TensorDoc, grid: Grid) -> None:
        """IntegrityError where a manifest gives a large size to small files: before anything is planned for it."""
        if doc.nbytes < _LARGE and grid.count < _MANY:
            return
        last = tuple((n - 1) // s for n, s in zip(doc.shape, grid.shard, strict=True))
        for shard in (last, (0,) * len(last)):
            key = shard_key(str(doc.path), shard)
            try:
                size, expected = self.store.info(key).size, grid.file_nbytes(shard)
            except NotFound as error:
                raise MissingData(f"{doc.name} ({doc.state}): {error.message}") from error
            if size != expected or grid.count > _TOO_MANY:
                raise IntegrityError(
                    f"{doc.name} ({doc.state}): {key} has {size} bytes instead of {expected}, or the manifest gives it "
                    f"an impossible number of shards ({grid.count})",
                    hint="restore the file and the manifest from another copy",
                )

    def sidecar(self) -> Sidecar:
        """The extents of the tensors that are not arrays; read and checked once, when they are first needed."""
        if self._sidecar is None:
            doc = self.manifest.sidecar
            if doc is None:
                raise IntegrityError(f"{self.store.url}: the manifest has tensors without a path and no sidecar")
            from ucformat.format.sidecar import decode  # only this needs NumPy

            where = f"{self.store.url}/{doc.path}"
            self._sidecar = decode(self.read_file(doc), [len(t.shape) for t in self.manifest.tensors], where)
        return self._sidecar
