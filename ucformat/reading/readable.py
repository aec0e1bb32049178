"""What tensors are read from: an opened checkpoint of any kind, or a view of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key, TensorList, Tiles
    from ucformat.storage.base import Store

__all__ = [
    "TRACKERS",
    "CheckpointMetadata",
    "FileRecord",
    "IntKey",
    "LazyMapping",
    "LazySequence",
    "Place",
    "Readable",
    "StatePath",
    "json_key",
    "path_from_json",
    "path_to_json",
]

T = TypeVar("T")

#: Files that name the last checkpoint of a run. They change while older ones are read, and hold nothing of these.
TRACKERS = frozenset({"latest", "latest_universal", "latest_checkpointed_iteration.txt"})


class IntKey(int):
    """A key of a mapping that is an integer."""


#: Where a value lies in a program's nested state; integers are places in lists.
StatePath = tuple[str | int | IntKey, ...]


def json_key(key: str | int) -> str:
    """The key of a JSON object that stands for a key of a dictionary."""
    if isinstance(key, str):
        return "$" + key if key.startswith("$") else key
    return f"$int:{key}"


def path_to_json(path: StatePath) -> list[str | int]:
    """A path as manifests have it: integers are places in lists, and keys are as `json_key` makes them."""
    return [p if type(p) is int else json_key(p) for p in path]


def path_from_json(parts: Sequence[str | int]) -> StatePath:
    """The path that `path_to_json` made this of."""
    return tuple(p if isinstance(p, int) else _key(p) for p in parts)


def _key(text: str) -> str | int:
    number = text.removeprefix("$int:")
    return IntKey(number) if number != text and number.lstrip("-").isdecimal() else text.removeprefix("$")


class LazyMapping(Mapping[str, T]):
    """A mapping that is read when it is first used."""

    def __init__(self, read: Callable[[], Mapping[str, T]]) -> None:
        self._read = read

    @cached_property
    def _value(self) -> Mapping[str, T]:
        return self._read()

    def __getitem__(self, key: str) -> T:
        return self._value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


class LazySequence(Sequence[T]):
    """A sequence that is read when it is first used."""

    def __init__(self, read: Callable[[], Sequence[T]]) -> None:
        self._read = read

    @cached_property
    def _value(self) -> Sequence[T]:
        return self._read()

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._value[index]

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an optimizer group lies in a program's state: the path of its optimizer, and its own names of parameters.

    Of `flattened` state dicts each parameter's hyper-parameters are entries.
    """

    path: StatePath
    names: tuple[str, ...]
    flattened: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """All but the tensor list, paths and means are mappings and sequences of plain JSON values."""

    tensor_list: TensorList
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied name -> name of the stored tensor
    objects: Mapping[str, Any] = field(default_factory=dict)
    assets: tuple[str, ...] = ()  # keys of files to keep as they are
    groups: Sequence[Mapping[str, Any]] = ()  # optimizer groups: hyper-parameters and "params", names in order
    #: The paths of each tensor, and the place of each optimizer group, in the state of the program that saved; none
    #: where that is not known.
    paths: Mapping[Key, tuple[StatePath, ...]] = field(default_factory=dict)
    places: Sequence[Place | None] = ()
    step: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)  # {"zero": 3, "dp": 4, …}
    engine: Mapping[str, str] = field(default_factory=dict)  # {"name": "deepspeed", "version": "0.19.8", …}
    files: tuple[str, ...] = ()  # keys of every file that holds a part of it
    #: Tensors that are stored as several contributions, of which each is the mean; those are in no tensor list.
    means: Mapping[Key, tuple[Key, ...]] = field(default_factory=dict)
    save_id: str = ""  # what the writer called this one save, as it calls no other; where it did
    folder: str = ""  # the folder or file in the store that is the checkpoint itself, where the store is around it

    def but(self, **changed: Any) -> CheckpointMetadata:
        """The same but for these fields."""
        return CheckpointMetadata(**{f.name: getattr(self, f.name) for f in fields(CheckpointMetadata)} | changed)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Bytes of a file that stand under one checksum; `crc32` is None where the writer computed none.

    `locate` gives the byte of the file where they begin, which may have to be read; it is after `near` and before any
    other record's `near`.
    """

    file: str
    name: str
    nbytes: int
    crc32: int | None
    locate: Callable[[], int]
    near: int = 0


class Readable(Protocol):
    """What tensors are read from: an opened checkpoint, whoever wrote it, or a view of one."""

    kind: str
    store: Store
    metadata: CheckpointMetadata

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """Where the bytes of one tensor lie: at least those extents that meet the box `within` (None: all).

        Together they cover it. Of a source that says more than it must, the callers take what they need.

        Args:
            key: the tensor's.
            within: the box, in elements of the tensor.

        Raises:
            MissingData: a part of the tensor is stored in no file.
            CoverageError: the extents leave a hole.
        """
