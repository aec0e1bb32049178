"""Reads a universal checkpoint: opening it reads its manifest and no other file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, NotFound, UcformatError
from ucformat.format.arrays import shard_key, shard_places
from ucformat.format.bases import Bases, BasesStore, OpenedBases
from ucformat.format.chunking import Grid
from ucformat.format.digest import bytes_digest
from ucformat.format.mounted import MountedStore, is_below
from ucformat.format.stored_tensors import StoredTensors, ValueByKey
from ucformat.format.structure import MOUNT, manifest_problems, read_manifest, refuse
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Key, TensorList, Tiles
from ucformat.reading.readable import (
    CheckpointMetadata,
    GroupPlace,
    LazyMapping,
    LazySequence,
    Loss,
    path_from_json,
    path_to_json,
)
from ucformat.schema import ITEMSIZE, MANIFEST
from ucformat.schema.manifest import GroupDoc, Manifest
from ucformat.schema.tensors import CODECS, TensorDoc, TensorTable
from ucformat.schema.values import loads
from ucformat.storage.base import ENCODED
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import WatchedStore, first_info

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ucformat.format.encoded import Image
    from ucformat.format.patched import PatchedTiles
    from ucformat.format.sidecar import Sidecar
    from ucformat.geometry.tensor import Extent, FileRun
    from ucformat.schema.manifest import FileDoc
    from ucformat.schema.tensors import KindDoc
    from ucformat.storage.base import Store

#: The names of the file from which Hugging Face's tools begin to load a model's weights.
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")

_LARGE_BYTES = 256 << 20  # a manifest must not claim more for small files
_LARGE_SHARDS = 10_000
_FEW_SHARDS = 16  # of an array, which are remembered


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that a file, or a part of it, consists of."""
    try:
        document = loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where} is not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{where} is not a JSON object")
    return document


def grid_of(doc: TensorDoc | KindDoc) -> Grid:
    """The grid of a tensor that is stored as an array."""
    return Grid(doc.shape, doc.chunk or (), doc.shard or (), doc.unit)


@lru_cache(maxsize=1 << 10)  # layers repeat: a model has few distinct shapes
def _few_near(grid: Grid, within: Box | None) -> tuple[tuple[tuple[int, ...], Tiles], ...]:
    """The shards that are near a box, each with its tiles, of an array of few shards."""
    return tuple((shard, grid.tiles(shard, "")) for shard in grid.shards(within))


def unknown_word(doc: TensorDoc | KindDoc) -> str | None:
    """Why tensors cannot be read that a later ucformat, or another program, has written; None if they can be."""
    for what, word, words in (
        ("has the dtype", doc.dtype, ITEMSIZE),
        ("has the codec", doc.codec, (None, *CODECS)),
    ):
        if word not in words:
            return f"{what} {str(word)[:100]!r}, which this ucformat does not know"
    return None


class Universal:
    """An opened universal checkpoint."""

    kind = "ucformat"

    def __init__(
        self,
        store: Store,
        roots: Callable[[], Sequence[str]] = tuple,
        manifest: Manifest | None = None,
        *,
        watch: Callable[[Store], WatchedStore] = WatchedStore,
        opened: OpenedBases | None = None,
    ) -> None:
        """Open the checkpoint that is committed in a store.

        Args:
            roots: returns the places in which files of other checkpoints may be read (default:
                none).
            watch: makes the stores of its bases.
            opened: the bases that are open of the checkpoint of which this is one.
        """
        watching = store if isinstance(store, WatchedStore) else WatchedStore(store)
        self.store: Store = watching
        self._shared_tiles = watching.tiles
        if isinstance(watching.inner, LocalStore):
            watching.inner = watching.inner.confined(lambda path: is_below(path, roots()))
        self.manifest = manifest or read_manifest(watching)[0]
        refuse(store.url, manifest_problems(self.manifest))
        sidecar = self.manifest.sidecar
        if sidecar is not None and sidecar.roots:
            watching.inner = MountedStore(watching.inner, sidecar, roots)
        if self.manifest.tensors.is_encoded:
            from ucformat.format.encoded import EncodedStore  # which imports NumPy

            watching.inner = EncodedStore(
                watching.inner, self._image, watching.tiles, self.manifest.id
            )
        m, table = self.manifest, self.manifest.tensors
        self._encoded_arrays: dict[str, TensorDoc] = {}
        opened = opened or OpenedBases(m)
        self.bases = Bases(
            *(store.url, m, opened, roots),
            lambda base: Universal(watch(base), roots, watch=watch, opened=opened),
        )
        if m.bases:
            watching.inner = BasesStore(watching.inner, self.bases)
        self.docs: Mapping[Key, TensorDoc] = ValueByKey(table, table.__getitem__)
        groups = LazyMapping(lambda: {name: i for i, g in enumerate(m.groups) for name in g.params})
        paths = LazyMapping(
            lambda: {
                key: tuple(map(path_from_json, at))
                for row, key in enumerate(self.docs)
                if (at := table.at_of(row))
            }
        )
        unreadable = {
            Key(d.name, d.state): reason
            for d in (table if any(map(unknown_word, table.kinds)) else ())
            if (reason := unknown_word(d)) is not None
        }
        stored = StoredTensors(table)
        readable = tuple(i for i in stored if i.key not in unreadable) if unreadable else stored
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(readable, groups),
            unreadable=unreadable,
            aliases=m.aliases,
            assets=tuple(m.assets),
            groups=LazySequence(
                lambda: tuple({"params": list(g.params), **g.options} for g in m.groups)
            ),
            paths=paths if table.at or any(k.at for k in table.kinds) else {},
            places=tuple(_place(g) for g in m.groups),
            step=m.step,
            layout=m.layout,
            engine={
                k.removeprefix("engine."): v
                for k, v in m.producer.items()
                if k.startswith("engine.")
            },
            files=(MANIFEST,),
            fingerprints=(
                ValueByKey(table, table.fingerprint.__getitem__) if table.fingerprint else {}
            ),
            lossy={
                Key(doc.name, doc.state): Loss(str(doc.lossy), *(doc.bound or (0.0, 0.0)))
                for doc in map(table.__getitem__, map(int, table.bound))
            },
            older={Key(*key): step for key, step in table.older()},
        )
        self._sidecar: Sidecar | None = None
        self._missing: dict[str, int] = {}

    def objects(self) -> dict[str, Any]:
        """Read the non-tensor values, by name."""
        doc = self.manifest.objects
        return (
            {} if doc is None else json_object(self.read_file(doc), f"{self.store.url}/{doc.path}")
        )

    def read_file(self, doc: FileDoc) -> bytes:
        """Read a file that the manifest lists, and check its digest."""
        data = self.read_range(doc)
        if len(data) != doc.nbytes or bytes_digest(data) != doc.digest:
            reason = (
                "its digest differs"
                if len(data) == doc.nbytes
                else f"{len(data)} bytes instead of {doc.nbytes}"
            )
            raise IntegrityError(
                f"{self.store.url}/{doc.path} differs from the committed file ({reason})",
                hint="restore it from another copy of the checkpoint",
            )
        return data

    def read_range(self, doc: FileDoc, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Read a range of a file that the manifest lists, which the caller checks."""
        try:
            return self.store.read(doc.path, offset, nbytes)
        except NotFound as error:
            raise MissingData(error.message) from error

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """See Readable."""
        table = self.manifest.tensors
        if (row := table.row(*key)) is None:
            raise KeyError(key)
        kind = table.kinds[table.kind[row]]
        if kind.is_referenced:
            yield from self.bases.extents(table[row], within)
            return
        folder = table.folder(row)
        if folder is None:
            yield from self._sidecar_of(kind).extents(row, within)
            return
        grid = grid_of(kind)
        if not kind.nbytes:
            return
        near: Iterable[tuple[tuple[int, ...], Tiles]]
        if grid.count <= _FEW_SHARDS:
            near = _few_near(grid, within)
        else:
            near = ((shard, grid.tiles(shard, "")) for shard in grid.shards(within))
        if kind.nbytes >= _LARGE_BYTES or grid.count >= _LARGE_SHARDS:
            self._check_large(table[row], grid, Box.whole(kind.shape) if within is None else within)
        prefix = ""
        if kind.codec is not None:
            self._encoded_arrays[folder], prefix = table[row], ENCODED
        for shard, tiles in near:
            file = prefix + shard_key(folder, shard)
            yield Tiles(tiles.box, file, 0, tiles.chunk, tiles.itemsize)

    @cached_property
    def encoded_sizes(self) -> Mapping[str, int]:
        """The sizes of the files of encoded arrays, which are listed once."""
        folders = {
            str(kind.path) for kind in self.manifest.tensors.kinds if kind.codec and kind.path
        }
        return {info.key: info.size for folder in folders for info in self.store.list(folder)}

    def file_runs(self, key: Key, within: Box) -> Iterable[Extent | Tiles | FileRun]:
        """See `HasFileRuns`."""
        table = self.manifest.tensors
        row = table.row(*key)
        if row is None:
            raise KeyError(key)
        kind = table.kinds[table.kind[row]]
        if kind.is_referenced:
            return self.bases.file_runs(table[row], within)
        described = self._sidecar_of(kind).described if kind.in_sidecar else None
        if described is None or row not in described:
            return self.extents(key, within)
        return described.file_runs(row, within)

    def _sidecar_of(self, doc: TensorDoc | KindDoc) -> Sidecar:
        """The extents of the tensors that are stored like this one: in encoded files, or plainly."""
        return self.sidecar() if doc.codec is None else self._encoded_sidecar

    @cached_property
    def _encoded_sidecar(self) -> Sidecar:
        return self.sidecar().below(ENCODED)

    def _image(self, store: Store, file: str) -> Image:
        """What an encoded file says of its chunks or tiles."""
        from ucformat.format.shard import ShardImage
        from ucformat.format.tile_index import read_index

        for folder, shard in shard_places(file):
            doc = self._encoded_arrays.get(folder)
            if doc is not None and len(doc.shape) == len(shard):
                return ShardImage.read(store, file, grid_of(doc), shard, str(doc.codec))
        return read_index(store, file, self._patched)

    @cached_property
    def _patched(self) -> PatchedTiles:
        from ucformat.format.patched import PatchedTiles  # which imports NumPy

        table = self.manifest.tensors
        return PatchedTiles(self.store.url, table, self.bases, self.sidecar, self._shared_tiles)

    def missing_shards(self, doc: TensorDoc) -> int:
        """The least number of missing files of an array with at least 10,000 shards (0 for others).

        Files are counted once, by listing the array's folder; their content is not read.
        """
        path, count = str(doc.path), grid_of(doc).count
        if count < _LARGE_SHARDS:
            return 0
        if path not in self._missing:
            self._missing[path] = max(0, count - sum(1 for _ in self.store.list(f"{path}/c")))
        return self._missing[path]

    def _check_large(self, doc: TensorDoc, grid: Grid, within: Box) -> None:
        """Before planning, raise IntegrityError if a manifest claims a large size for small files that are needed."""
        if not within.size or (doc.nbytes < _LARGE_BYTES and grid.count < _LARGE_SHARDS):
            return
        # bounds the work by the files that exist
        if (missing := self.missing_shards(doc)) > grid.count // 2:
            raise MissingData(
                f"{doc.name} ({doc.state}): {missing:,} of its {grid.count:,} shards are missing"
            )
        first = tuple(n // s for n, s in zip(within.start, grid.shard, strict=True))
        last = tuple((n - 1) // s for n, s in zip(within.stop, grid.shard, strict=True))
        for shard in dict.fromkeys((last, first)):
            key = shard_key(str(doc.path), shard)
            try:
                grid.check_size(shard, doc.codec, first_info(self.store, key).size)
            except NotFound as error:
                raise MissingData(f"{doc.name} ({doc.state}): {error.message}") from error
            except IntegrityError as error:
                raise IntegrityError(
                    f"{doc.name} ({doc.state}): {key}: {error.message}",
                    hint="restore the file and the manifest from another copy",
                ) from error

    def sidecar(self) -> Sidecar:
        """The extents of the tensors that are not arrays; read and checked when first needed, and then kept."""
        if self._sidecar is None:
            from ucformat.format.extents import extent_problems, feature_problems

            sidecar, doc = self.read_sidecar(), self.manifest.sidecar
            assert doc is not None  # noqa: S101 - it was read
            refuse(self.store.url, feature_problems(self.manifest, sidecar))
            refuse(self.store.url, extent_problems(doc, self.manifest.tensors, sidecar))
            self._sidecar = sidecar
        return self._sidecar

    def read_documents(self, known: Collection[str] = ()) -> None:
        """Read what tells where elements are, here and in bases; of those that cannot be opened, nothing.

        Args:
            known: the ids of bases of which nothing is read.
        """
        if self.manifest.sidecar is not None:
            self.sidecar()
        for number, base in enumerate(self.manifest.bases):
            if base.id in known:
                continue
            with suppress(UcformatError):  # raised again for the tensors that need it
                self.bases.opened(number).read_documents(known)

    @property
    def weights_folder(self) -> str | None:
        """The key of the folder with the safetensors files of the weights; None if they are not stored so."""
        kinds = self.manifest.tensors.kinds
        is_partial = any(kind.is_referenced and kind.state == "weight" for kind in kinds)
        if is_partial or not any(kind.in_sidecar for kind in kinds):
            return None
        folders = (
            file.rpartition("/") for file in self.sidecar().files if not file.startswith(MOUNT)
        )
        return next((folder for folder, _, name in folders if name in WEIGHT_FILES), None)

    @gc_paused()
    def read_sidecar(self) -> Sidecar:
        """Read the sidecar, and check that its columns match each other, but not whether the extents are possible."""
        doc = self.manifest.sidecar
        if doc is None:
            raise IntegrityError(f"{self.store.url}: the manifest has no sidecar")
        from ucformat.format.sidecar import decode

        where = f"{self.store.url}/{doc.path}"
        return decode(self.read_file(doc), self.manifest.tensors, where)


def _place(group: GroupDoc) -> GroupPlace | None:
    if group.at is None:
        return None
    return GroupPlace(
        path_from_json(group.at),
        group.params if group.names is None else group.names,
        group.flattened,
    )


def describe(
    metadata: CheckpointMetadata,
    run: str | None,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
) -> Manifest:
    """Describe a checkpoint of any format as a manifest without id, attempt, locations in files, or digests."""
    tensors = (
        TensorDoc(
            *(i.name, i.state, i.dtype, i.shape),
            at=paths_of(metadata, i.key),
            fingerprint=metadata.fingerprints.get(i.key),
        )
        for i in metadata.tensor_list.tensors
    )
    return Manifest(
        id="",
        attempt="",
        created=datetime.now(UTC),
        producer={f"engine.{k}": v for k, v in metadata.engine.items()},
        run=run,
        metrics=dict(metrics),
        config=dict(config),
        step=metadata.step,
        layout=dict(metadata.layout),
        groups=group_docs(metadata),
        aliases=dict(metadata.aliases),
        tensors=TensorTable.of(marked(tensors, metadata)),
    )


def marked(docs: Iterable[TensorDoc], metadata: CheckpointMetadata) -> tuple[TensorDoc, ...]:
    """Tensors of a checkpoint, or as they are written anew, with the marks of those that are lossy, or older, there."""
    if not (metadata.lossy or metadata.older):
        return tuple(docs)

    def marked(doc: TensorDoc) -> TensorDoc:
        key = Key(doc.name, doc.state)
        if (loss := metadata.lossy.get(key)) is not None:
            doc = replace(doc, lossy=loss.encoding, bound=(loss.absolute, loss.relative))
        return doc if (step := metadata.older.get(key)) is None else replace(doc, step=step)

    return tuple(map(marked, docs))


def paths_of(metadata: CheckpointMetadata, key: Key) -> tuple[tuple[str | int, ...], ...]:
    """The paths of a tensor in the training state, in the form of the manifest."""
    return tuple(tuple(path_to_json(p)) for p in metadata.paths.get(key, ()))


def group_docs(metadata: CheckpointMetadata) -> tuple[GroupDoc, ...]:
    """The optimizer groups in the form of the manifest."""
    places = metadata.places or (None,) * len(metadata.groups)
    return tuple(
        group_doc(tuple(g["params"]), {k: v for k, v in g.items() if k != "params"}, place)
        for g, place in zip(metadata.groups, places, strict=True)
    )


def group_doc(
    params: tuple[str, ...], options: dict[str, Any], place: GroupPlace | None
) -> GroupDoc:
    """An optimizer group in the form of the manifest."""
    if place is None:
        return GroupDoc(params=params, options=options)
    names = place.names if place.names != params else None
    at = tuple(path_to_json(place.path))
    return GroupDoc(params=params, options=options, at=at, names=names, flattened=place.flattened)
