"""torch_checkpointing's checkpoints, read in place: an item is a file of each rank, with what the rank has of it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ucformat.engines.torch_checkpointing.folder import DEFAULT_FILE, METADATA
from ucformat.engines.torch_checkpointing.sharding import (
    SAFETENSORS,
    TORCH,
    SavedItems,
    Sharding,
    read_metadata,
    sharding_of_part,
)
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.distribution import Distribution, RankMesh
from ucformat.geometry.tensor import Extent
from ucformat.reading.readable import CheckpointMetadata, LazyMapping
from ucformat.reading.stand_ins import Inert, LocalPart, OpaqueFile, StoredTensor
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.reading.values import packed
from ucformat.sources.distcp.metadata import Items, Metadata, TensorEntry
from ucformat.sources.distcp.opened import ItemValues, OpenDcp, nested_objects, plain_value
from ucformat.sources.pickle.allowed import PARTS
from ucformat.sources.pickle.file import TorchFile, TorchZip
from ucformat.sources.safetensors import read_header
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.engines.torch_checkpointing.sharding import Placed
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import FileRecord
    from ucformat.reading.readable import StatePath as Path
    from ucformat.sources.safetensors import Header
    from ucformat.storage.base import Store

_SAFETENSORS = ".safetensors"
_MAX_OPEN = 64  # files whose pickles are kept
_MAX_NODES, _MAX_DEPTH = 5_000_000, 64  # of a value
#: What `optimizer_transform_pre` leaves of a group's `params`.
_NAMES = "param_names"


@dataclass(slots=True)
class Leaves:
    """What a file of a rank has, by paths in its item."""

    file: TorchFile | Header
    tensors: dict[Path, StoredTensor | LocalPart | TensorInfo] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)


class RankFiles:
    """The files of all ranks, by item; the last ones that were opened are kept open."""

    def __init__(
        self, store: Store, saved: SavedItems, allow: tuple[str, ...], some_ranks: Sequence[str]
    ) -> None:
        self.store, self.saved, self._allow = store, saved, (*allow, PARTS)
        keys = [info.key for info in store.list()]
        self.files: dict[str, dict[int, tuple[str, str]]] = {}
        for key in keys:
            if match := DEFAULT_FILE.fullmatch(key):
                self.files.setdefault(match[1], {})[int(match[2])] = (key, TORCH)
        world = saved.world or 1 + max((r for f in self.files.values() for r in f), default=-1)
        self.world = world
        for key, item in saved.items.items():
            default = {rank: (f"{key}_{rank}.pt", TORCH) for rank in range(world)}
            self.files[key] = default | item.files
        for key, files in self.files.items():
            self._check(key, files, set(keys), some_ranks)
        named = {file for files in self.files.values() for file, _ in files.values()}
        self.others = tuple(k for k in keys if k not in named and k != METADATA)
        lost = [
            k for k in self.others if k.endswith(_SAFETENSORS) or ("/" in k and k.endswith(".pt"))
        ]
        if lost and not saved.world:
            raise MissingData(
                f"{METADATA} is missing, which says what {lost[0]} is",
                hint="copy it again; SyncCheckpointSaver writes it only with the first checkpoint of "
                "a run, whose one is that of the others if nothing was sharded otherwise",
            )
        self.opened = lru_cache(maxsize=_MAX_OPEN)(self._open)

    def _check(
        self,
        key: str,
        files: dict[int, tuple[str, str]],
        keys: set[str],
        some_ranks: Sequence[str],
    ) -> None:
        """MissingData if a rank's file is missing."""
        if extra := [rank for rank in files if rank >= self.world]:
            raise IntegrityError(
                f"{self.store.url} has {files[extra[0]][0]}, but {self.world} ranks saved it",
                hint="it has files of several checkpoints",
            )
        missing = next(
            (r for r in range(self.world) if r not in files or files[r][0] not in keys), None
        )
        if missing is None or (key in some_ranks and key not in self.saved.items):
            return
        name = files[missing][0] if missing in files else f"{key}_{missing}.pt"
        raise MissingData(
            f"{name} is missing, in which rank {missing} of {self.world} saved {key}",
            hint="copy the files of all ranks; if that rank did not save it: "
            f"{option_text('some_ranks', repr([key]))}",
        )

    def _open(self, key: str, rank: int) -> Leaves:
        """Open a rank's file of an item."""
        file, kind = self.files[key][rank]
        if kind == TORCH:
            opened = TorchFile(self.store, file, allow=self._allow, exact=True)
            leaves = Leaves(opened)
            _Flattened(leaves, file).add(opened.value, (), 0)
        elif kind == SAFETENSORS:
            header = read_header(self.store, file)
            leaves = Leaves(header)
            described = self.saved.items[key].shardings if key in self.saved.items else {}
            paths = {dotted(path): path for path in described}
            for name, info in header.tensors.items():
                leaves.tensors[paths.get(name, (name,))] = info
            if header.unreadable:
                name, why = next(iter(header.unreadable.items()))
                raise UnsupportedError(f"{file}: {name} {why}")
        else:
            raise UnsupportedError(f"{file} has tensors in the format {kind!r:.99}")
        return leaves

    def extents(self, key: str, path: Path, sharding: Sharding, placed: Placed) -> Iterator[Extent]:
        """The extents of a rank's local tensor, of which some box is read."""
        leaves = self.opened(key, placed.rank)
        tensor = leaves.tensors.get(path)
        file = self.files[key][placed.rank][0]
        label = f"{dotted((key, *path))} of rank {placed.rank}"
        if tensor is None:
            raise MissingData(f"{file} does not have {label}")
        stored = tensor.tensor if isinstance(tensor, LocalPart) else tensor
        whole, local = Box.whole(stored.shape), placed.local
        fits = len(local.shape) == len(stored.shape) and whole.contains(local)
        if sharding.distribution is not None:
            fits = whole == local
        if not fits or stored.dtype != sharding.dtype:
            raise IntegrityError(
                f"{file}: {label} is {stored.dtype} of {list(stored.shape)}, and not "
                f"{sharding.dtype} with {local}",
                hint="the files and the metadata are of different saves, or the file is damaged",
            )
        if isinstance(leaves.file, TorchFile) and isinstance(stored, StoredTensor):
            yield from leaves.file.whole(stored)
        else:
            assert not isinstance(leaves.file, TorchFile)  # noqa: S101
            yield from leaves.file.extents(dotted(path))


class _Flattened:
    """Flattens the value of a file: dictionaries, and lists with dictionaries or tensors in them."""

    def __init__(self, leaves: Leaves, file: str) -> None:
        self.leaves, self._file, self._nodes = leaves, file, 0

    def add(self, value: Any, path: Path, depth: int) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise UnsupportedError(f"{self._file} holds too many values to be a checkpoint")
        if isinstance(value, StoredTensor | LocalPart):
            self.leaves.tensors[path] = value
        elif isinstance(value, dict) and all(type(k) in (str, int) for k in value):
            for key, item in value.items():
                of_group = key == _NAMES and "params" not in value and path[-2:-1] == (GROUPS,)
                self.add(item, (*path, "params" if of_group else key), depth + 1)
        elif isinstance(value, list | tuple) and any(
            isinstance(v, StoredTensor | LocalPart | dict | list | tuple) for v in value
        ):
            for i, item in enumerate(value):
                self.add(item, (*path, i), depth + 1)
        else:
            self.leaves.values[path] = value


class RankItems(Items):
    """The leaves of all items as those of one state, in which the first part of a path is the item."""

    def __init__(self, files: RankFiles, allow: tuple[str, ...]) -> None:
        meta = Metadata(METADATA, Inert(METADATA))
        super().__init__(files.store, meta, allow)
        self.rank_files = files
        self._shardings: dict[str, tuple[str, Path, Sharding]] = {}
        self._values: dict[str, list[tuple[int, TorchFile]]] = {}
        for key in files.files:
            self._add_item(key)

    def _add_item(self, key: str) -> None:
        files, ranks = self.rank_files, sorted(self.rank_files.files[key])
        item = files.saved.items.get(key)
        described = item.shardings if item else {}
        map_io(lambda rank: files.opened(key, rank), ranks[:_MAX_OPEN])
        ranks_of: dict[Path, list[int]] = {}
        for rank in ranks:
            leaves = files.opened(key, rank)
            for path in leaves.tensors:
                ranks_of.setdefault(path, []).append(rank)
            for path, value in leaves.values.items():
                self._add_value(key, path, rank, leaves, value)
        if lost := [path for path in described if path not in ranks_of]:
            raise MissingData(
                f"no rank's file of {key} has {dotted(lost[0])}, which {METADATA} describes",
                hint="the files and the metadata are of different saves",
            )
        for path, of_ranks in ranks_of.items():
            sharding = described.get(path)
            if sharding is None:
                sharding = self._undescribed(key, path, of_ranks, ranks)
            elif sharding.distribution is not None and not sharding.distribution.cuts:
                sharding = self._if_equal(key, path, of_ranks, sharding)
            if sharding is None:
                for rank in of_ranks:
                    leaves = files.opened(key, rank)
                    self._add_value(key, path, rank, leaves, leaves.tensors[path])
                continue
            fqn = self._name(key, path)
            self._shardings[fqn] = (key, path, sharding)
            self.meta.tensors[fqn] = TensorEntry(sharding.dtype, sharding.shape, ())

    def _name(self, key: str, path: Path) -> str:
        """The dotted name of a leaf, by which it must be the only one."""
        full = (key, *path)
        fqn = dotted(full)
        if self.meta.paths.setdefault(fqn, full) != full:
            raise UnsupportedError(
                f"the item {key} has two entries whose keys joined by dots are {fqn}",
                hint="give them different names",
            )
        return fqn

    def _add_value(self, key: str, path: Path, rank: int, leaves: Leaves, value: Any) -> None:
        fqn = self._name(key, path)
        assert isinstance(leaves.file, TorchFile)  # noqa: S101 - safetensors have no values
        of_ranks = self._values.setdefault(fqn, [])
        if not of_ranks:
            self.meta.values.append(fqn)
        elif _plainly_equal(of_ranks[0][1].value, value):
            return  # mostly: what is kept does not grow with the ranks
        leaf = copy(leaves.file)
        leaf.value = value
        of_ranks.append((rank, leaf))

    def _undescribed(
        self, key: str, path: Path, of_ranks: list[int], ranks: list[int]
    ) -> Sharding | None:
        """The sharding of a tensor that the metadata does not describe; None if it is a value of each rank."""
        label = dotted((key, *path))
        first = self.rank_files.opened(key, of_ranks[0])
        tensor = first.tensors[path]
        if isinstance(tensor, LocalPart):
            return sharding_of_part(label, tensor)
        whole = _on(Sharding(tensor.dtype, tensor.shape), of_ranks[0])
        if len(ranks) == 1:
            return whole
        if len(of_ranks) == len(ranks) and self._equal(key, path, of_ranks):
            return whole
        return self._differing(tensor, whole, "nothing says how it is sharded")

    def _if_equal(
        self, key: str, path: Path, of_ranks: list[int], sharding: Sharding
    ) -> Sharding | None:
        """The sharding of a replica, which the library takes every plain tensor for; None of a value of each rank."""
        tensor = self.rank_files.opened(key, of_ranks[0]).tensors[path]
        if not isinstance(tensor, StoredTensor) or self._equal(key, path, of_ranks) is not False:
            return sharding
        return self._differing(tensor, sharding, "the metadata says that it is replicated")

    def _differing(self, tensor: Any, sharding: Sharding, why: str) -> Sharding | None:
        """What a tensor is that differs between ranks: a value of each rank, or unreadable."""
        if tensor.dtype.startswith(("int", "uint", "bool")) and isinstance(tensor, StoredTensor):
            return None
        reason = f"differs between ranks, and {why}: save it as a DTensor, with a resharder"
        return replace(sharding, dtype=f"{tensor.dtype} {reason}")

    def _equal(self, key: str, path: Path, of_ranks: list[int]) -> bool | None:
        """Whether ranks have the same tensor, by the checksums of their files; None if some have none."""
        forms = set()
        for rank in of_ranks:
            leaves = self.rank_files.opened(key, rank)
            tensor = leaves.tensors[path]
            if not isinstance(tensor, StoredTensor) or not isinstance(leaves.file, TorchFile):
                return None
            crc = leaves.file.crc32(tensor)
            if not crc and tensor.size:
                return None
            forms.add((tensor.dtype, tensor.shape, tensor.strides, tensor.offset, crc))
        return len(forms) == 1

    def extents(self, fqn: str, info: TensorInfo, within: Box | None = None) -> Iterator[Extent]:
        """Find the extents of a tensor in the files of the ranks that have them."""
        key, path, sharding = self._shardings[fqn]
        if within is None and sharding.boxes:
            prove(info, [(str(p.rank), p.box) for p in sharding.boxes])
        for placed in sharding.placed(within or Box.whole(info.shape)):
            start_of_box = placed.local.start
            for extent in self.rank_files.extents(key, path, sharding, placed):
                start = sum(i * s for i, s in zip(start_of_box, extent.strides, strict=True))
                yield Extent(placed.box, extent.file, extent.offset + start, extent.strides)

    def values(self, fqns: Iterable[str]) -> dict[str, TorchFile | OpaqueFile]:
        """The values, as the first rank that has them saved them; those of optimizer groups must be the same on all."""
        out: dict[str, TorchFile | OpaqueFile] = {}
        for fqn in fqns:
            of_ranks = self._values[fqn]
            out[fqn] = of_ranks[0][1]
            if any(GROUPS in str(part) for part in self.meta.paths[fqn]):
                self._check_same(fqn)
        return out

    def _check_same(self, fqn: str) -> None:
        (first, leaf), *others = self._values[fqn]
        value = plain_value(leaf, fqn)
        for rank, other in others:
            if plain_value(other, fqn) != value:
                raise UnsupportedError(
                    f"{fqn} differs between the ranks {first} and {rank}, as groups of pipeline stages do",
                    hint="save the state of the optimizer under the names of the parameters, flattened",
                )

    def of_ranks(self, fqns: Mapping[str, Path]) -> dict[str, Any]:
        """What values are on other ranks than the first, where they differ."""
        differing: dict[int, dict[str, tuple[Path, TorchFile]]] = {}
        for fqn, path in fqns.items():
            (_, leaf), *others = self._values[fqn]
            value = packed(plain_value(leaf, fqn))
            for rank, other in others:
                if packed(plain_value(other, fqn)) != value:
                    differing.setdefault(rank, {})[fqn] = (path, other)
        return {
            str(rank): nested_objects(
                {f: p for f, (p, _) in of_rank.items()}, {f: v for f, (_, v) in of_rank.items()}, ()
            )
            for rank, of_rank in sorted(differing.items())
        }

    def records(self) -> Iterator[FileRecord]:
        """List every record of the files of torch.save."""
        for files in self.rank_files.files.values():
            for file, kind in files.values():
                if kind == TORCH:
                    yield from TorchZip(self.store, file).records()


def _plainly_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal and plain; nothing is read of those that contain anything else."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_plainly_equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_plainly_equal(v, other[k]) for k, v in one.items())
    return one is None or (type(one) in (bool, int, str, float, bytes) and one == other)


def _on(whole: Sharding, rank: int) -> Sharding:
    """The sharding of a tensor that a rank has whole."""
    return replace(whole, distribution=Distribution(RankMesh((1,), rank, (0,))))


class OpenTorchCheckpointing(OpenDcp):
    """One opened checkpoint of torch_checkpointing."""

    kind = "torch_checkpointing"
    part = ""  # the files of all ranks are there

    def __init__(
        self,
        store: Store,
        allow: tuple[str, ...],
        groups: Sequence[Sequence[str]] | None,
        owners: Mapping[str, str] | None,
        some_ranks: Sequence[str],
    ) -> None:
        names = {info.key for info in store.list()}
        saved = read_metadata(store) if METADATA in names else SavedItems()
        self._files = RankFiles(store, saved, allow, some_ranks)
        if not self._files.files:
            raise MissingData(f"{store.url} has no files of ranks, such as model_0.pt")
        self._has_metadata = METADATA in names
        super().__init__(RankItems(self._files, allow), groups, owners)

    def _make_metadata(self, values: ItemValues) -> CheckpointMetadata:
        """The metadata, with the values of all ranks."""
        assert isinstance(self.items, RankItems)  # noqa: S101
        items, named = self.items, self.named
        groups, places = values.lazy_groups()

        def objects() -> dict[str, Any]:
            by_rank = items.of_ranks(named.values)
            return {**values.objects(), **({"rank": by_rank} if by_rank else {})}

        files = [file for files in self._files.files.values() for file, _ in files.values()]
        return CheckpointMetadata(
            tensor_list=self.contents.tensor_list(groups),
            groups=groups,
            places=places,
            objects=LazyMapping(objects),
            paths={
                key: (items.meta.paths[fqn],)
                for key, fqn in named.tensors.items()
                if key in self.contents.infos
            },
            unreadable=self.contents.unreadable,
            step=values.step(),
            layout={"world": self._files.world},
            engine={"name": "torch_checkpointing"},
            files=(*((METADATA,) if self._has_metadata else ()), *files),
        )
