"""The tensors and optimizer groups that a source found in a foreign checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, TensorNotFound
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.reading.readable import LazyMapping, unreadable_error
from ucformat.reading.stand_ins import why_refused
from ucformat.reading.values import to_json
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord, GroupPlace, StatePath
    from ucformat.reading.stand_ins import StoredTensor
    from ucformat.sources.base import OpenSource
    from ucformat.sources.pickle.file import TorchFile
    from ucformat.storage.base import Store

    #: Finds the extents of a tensor: at least those that overlap a box of it (None: all).
    Locate = Callable[[Box | None], Iterator[Extent]]


@dataclass(slots=True)
class Group:
    """An optimizer group: its hyper-parameters, plain state and the names of its parameters in order."""

    names: list[str]
    hyper: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """The group in the form of `CheckpointMetadata.groups`."""
        out = {**self.hyper, "params": self.names}
        return {**out, "state": self.state} if self.state else out


def _unknown_tensor(key: Key, keys: Iterable[Key], url: str) -> TensorNotFound:
    """The error for a tensor that a checkpoint does not have."""
    states = sorted(k.state for k in keys if k.name == key.name)
    return TensorNotFound(
        f"the checkpoint {url} has no {key}",
        hint=f"{key.name} has the states {', '.join(states)}"
        if states
        else "there is no tensor of this name",
    )


@dataclass(slots=True)
class TensorIndex:
    """The tensors of a checkpoint by key, each with a function that finds its extents."""

    infos: dict[Key, TensorInfo] = field(default_factory=dict)
    locate: dict[Key, Locate] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    # as in CheckpointMetadata
    paths: dict[Key, tuple[StatePath, ...]] = field(default_factory=dict)
    places: list[GroupPlace | None] = field(default_factory=list)  # likewise
    unreadable: dict[Key, str] = field(default_factory=dict)  # as in CheckpointMetadata
    # other values of the optimizer's file, as JSON
    optimizer: dict[str, Any] = field(default_factory=dict)
    # name -> the last suffix that made a name unique: `name~2`
    taken: dict[str, int] = field(default_factory=dict)

    def add(
        self, name: str, state: str, dtype: str, shape: tuple[int, ...], locate: Locate
    ) -> None:
        """Add a tensor."""
        if dtype not in ITEMSIZE:
            self.refuse(Key(name, state), why_refused(dtype))
        else:
            self.put(TensorInfo(name, state, dtype, shape), locate)

    def put(self, info: TensorInfo, locate: Locate) -> None:
        """Add a tensor."""
        key = info.key
        self._check_new(key)
        self.infos[key], self.locate[key] = info, locate
        self.taken.setdefault(info.name, 1)

    def refuse(self, key: Key, reason: str) -> None:
        """Add a tensor that cannot be read.

        Args:
            reason: why not, to follow its name: `has the dtype …`.
        """
        self._check_new(key)
        self.unreadable[key] = reason
        self.taken.setdefault(key.name, 1)

    def refused_with(self, key: Key) -> str | None:
        """Why a tensor cannot be read: it or the weight of its parameter is `unreadable`; None if neither is."""
        if (reason := self.unreadable.get(key)) is not None:
            return reason
        reason = self.unreadable.get(Key(key.name, "weight"))
        return None if reason is None else f"is a state of a parameter whose weight {reason}"

    def _check_new(self, key: Key) -> None:
        if key in self.infos or key in self.unreadable:
            raise IntegrityError(f"the checkpoint has two tensors {key}")

    def add_whole(self, name: str, state: str, file: TorchFile, tensor: StoredTensor) -> None:
        """Add a tensor that is stored whole in a file of torch.save."""
        self.add(name, state, tensor.dtype, tensor.shape, lambda box: file.whole(tensor, box))

    def add_large(self, path: str, file: TorchFile, tensor: StoredTensor) -> str:
        """Add a tensor that is part of a plain value, as a weight of its own."""
        name = path
        while name in self.taken:
            self.taken[path] += 1
            name = f"{path}~{self.taken[path]}"
        self.add_whole(name, "weight", file, tensor)
        return name

    def tensor_list(self, groups: Sequence[Mapping[str, Any]] | None = None) -> TensorList:
        """List the tensors: names in the order in which they were added, all states of a name together.

        Args:
            groups: in the form of `CheckpointMetadata.groups`, used when the group of a parameter
                is needed (default: those of the index).
        """
        order = {name: i for i, name in enumerate(dict.fromkeys(key.name for key in self.infos))}
        infos = tuple(sorted(self.infos.values(), key=lambda info: order[info.name]))
        if groups is not None:
            return TensorList(infos, LazyMapping(lambda: _numbers(g["params"] for g in groups)))
        return TensorList(infos, _numbers(group.names for group in self.groups))

    def extents(self, key: Key, within: Box | None, url: str) -> Iterator[Extent]:
        """Find where the bytes of a tensor are stored (see `OpenSource.extents`).

        Args:
            within: a box of the tensor; None: all of it.

        Raises:
            TensorNotFound: the index has no such tensor.
        """
        locate = self.locate.get(key)
        if key in self.unreadable:
            raise unreadable_error({key: self.unreadable[key]}, url)
        if locate is None:
            raise _unknown_tensor(key, self.infos, url)
        return locate(within)

    def json_of(self, file: TorchFile, value: Any, path: str = "", *, exact: bool = False) -> Any:
        """A value of a file in its JSON form; its larger tensors become tensors of the checkpoint.

        Args:
            exact: as for `to_json`.
        """

        def spill(where: str, tensor: StoredTensor) -> str:
            return self.add_large(where, file, tensor)

        return to_json(value, read=file.read, spill=spill, path=path, exact=exact)

    def keep_scalars(self, file: TorchFile, values: dict[str, Any]) -> None:
        """Set `optimizer`, the values of an optimizer's file besides the states of its parameters."""
        self.optimizer = self.json_of(file, values, "optimizer")


def _numbers(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """The number of the group of each parameter."""
    return {name: number for number, names in enumerate(groups) for name in names}


class IndexedSource:
    """An opened checkpoint whose tensors are those of an index, `contents`."""

    store: Store
    contents: TensorIndex

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Find where the bytes of a tensor are stored; opens files that hold them, if they are not yet open."""
        return self.contents.extents(key, within, self.store.url)

    def records(self) -> Iterator[FileRecord]:
        """None, as of formats without checksums."""
        return iter(())


class PrefixedSource:
    """An opened checkpoint in a folder of a larger one: its files become keys of the outer store."""

    def __init__(self, source: OpenSource, store: Store, folder: str) -> None:
        self.kind, self.store = source.kind, store
        self._source, self._below = source, f"{folder}/"
        metadata = source.metadata
        self.metadata = metadata.replace(
            assets=tuple(self._below + key for key in metadata.assets),
            files=tuple(self._below + key for key in metadata.files),
            folder=self._below + metadata.folder if metadata.folder else folder,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Find where the bytes of a tensor are stored."""
        for extent in self._source.extents(key, within):
            yield replace(extent, file=self._below + extent.file)

    def records(self) -> Iterator[FileRecord]:
        """List every record of its files."""
        for record in self._source.records():
            yield replace(record, file=self._below + record.file)
