"""The tensors and optimizer groups of a foreign checkpoint, as its source finds them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, TensorNotFound
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.sources.base import OpenSource
    from ucformat.sources.pickle.file import TorchFile
    from ucformat.sources.pickle.stand_ins import StoredTensor
    from ucformat.storage.base import Store

    #: Finds the extents of a tensor: at least those that meet a box of it (None: all).
    Locate = Callable[[Box | None], Iterator[Extent]]

__all__ = ["Group", "Locate", "PrefixedSource", "TensorIndex", "unknown_tensor"]


@dataclass(slots=True)
class Group:
    """An optimizer group: its hyper-parameters, plain state and the names of its parameters in order."""

    names: list[str]
    hyper: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As in `CheckpointMetadata`."""
        out = {**self.hyper, "params": self.names}
        return {**out, "state": self.state} if self.state else out


def unknown_tensor(key: Key, known: Iterable[Key], url: str) -> TensorNotFound:
    """What to say of a tensor that the checkpoint at `url`, which has the `known` ones, has not."""
    states = sorted(k.state for k in known if k.name == key.name)
    return TensorNotFound(
        f"the checkpoint {url} has no {key}",
        hint=f"{key.name} has the states {', '.join(states)}" if states else "there is no tensor of this name",
    )


@dataclass(slots=True)
class TensorIndex:
    """The tensors of a checkpoint and how to find each one's extents, by key."""

    infos: dict[Key, TensorInfo] = field(default_factory=dict)
    locate: dict[Key, Locate] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)  # what the optimizer's file holds besides those, as JSON
    taken: dict[str, int] = field(default_factory=dict)  # names; what the last one like it was numbered

    def add(self, name: str, state: str, dtype: str, shape: tuple[int, ...], locate: Locate) -> None:
        """A tensor; IntegrityError where it is there already."""
        info = TensorInfo(name, state, dtype, shape)
        if info.key in self.infos:
            raise IntegrityError(f"{info.key} stands twice in the checkpoint")
        self.infos[info.key], self.locate[info.key] = info, locate
        self.taken.setdefault(name, 1)

    def add_whole(self, name: str, state: str, file: TorchFile, tensor: StoredTensor) -> None:
        """A tensor that lies whole in one file."""
        self.add(name, state, tensor.dtype, tensor.shape, lambda _: file.whole(tensor))

    def add_large(self, path: str, file: TorchFile, tensor: StoredTensor) -> str:
        """A tensor out of a plain value, under the name of its path, or one like it that is free; returns the name."""
        name = path
        while name in self.taken:
            self.taken[path] += 1
            name = f"{path}~{self.taken[path]}"
        self.add_whole(name, "weight", file, tensor)
        return name

    def tensor_list(self) -> TensorList:
        """The tensors by name in the order in which names were added, each with its states together; their groups."""
        order = {name: i for i, name in enumerate(dict.fromkeys(key.name for key in self.infos))}
        infos = sorted(self.infos.values(), key=lambda info: order[info.name])
        return TensorList(tuple(infos), {name: g for g, group in enumerate(self.groups) for name in group.names})

    def extents(self, key: Key, within: Box | None, url: str) -> Iterator[Extent]:
        """Where the bytes of a tensor lie (see Readable); TensorNotFound where there is none of this key at `url`."""
        locate = self.locate.get(key)
        if locate is None:
            raise unknown_tensor(key, self.infos, url)
        return locate(within)

    def keep_scalars(self, file: TorchFile, values: dict[str, Any]) -> None:
        """What the optimizer's file says besides the tensors of its parameters."""

        def spill(path: str, tensor: StoredTensor) -> str:
            return self.add_large(path, file, tensor)

        self.optimizer = to_json(values, read=file.read, spill=spill, path="optimizer")


class PrefixedSource:
    """The same checkpoint, its files under keys of the store around it."""

    def __init__(self, source: OpenSource, store: Store, folder: str) -> None:
        self.kind, self.store = source.kind, store
        self._source, self._below = source, f"{folder}/"
        metadata = source.metadata
        self.metadata = metadata.but(
            assets=tuple(self._below + key for key in metadata.assets),
            files=tuple(self._below + key for key in metadata.files),
            folder=self._below + metadata.folder if metadata.folder else folder,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor lie."""
        for extent in self._source.extents(key, within):
            yield replace(extent, file=self._below + extent.file)

    def records(self) -> Iterator[FileRecord]:
        """Every record of its files."""
        for record in self._source.records():
            yield replace(record, file=self._below + record.file)
