"""The interface for reading tensors: an opened checkpoint of any kind, or a view of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload

from ucformat.errors import UnsupportedError, first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, FileRun, Key, TensorList, Tiles
    from ucformat.storage.base import Store

K = TypeVar("K")
T = TypeVar("T")

#: Files that name the last checkpoint of a run. They change while older checkpoints are read, and
#: are no part of them.
TRACKERS = frozenset({"latest", "latest_universal", "latest_checkpointed_iteration.txt"})

#: The member of a layout that says what a checkpoint is only a part of: one that was opened as
#: such, or made of it.
PART_OF = "part_of"

#: The object of a converted sub-model with the names of the files and objects that have the sizes
#: of the whole model.
OUTDATED = "outdated_sizes"


_INTEGER = re.compile(r"-?[0-9]{1,4000}")  # Python refuses to parse more than 4300 digits


class IntKey(int):
    """An integer key of a mapping."""


#: The path of a value in a program's nested state; integers are positions in lists.
StatePath = tuple[str | int | IntKey, ...]


def json_key(key: str | int) -> str:
    """The key of a JSON object that represents a key of a dictionary."""
    if isinstance(key, str):
        return "$" + key if key.startswith("$") else key
    return f"$int:{key}"


def path_to_json(path: StatePath) -> list[str | int]:
    """A path as manifests spell it: integers are positions in lists, and keys are spelled by `json_key`."""
    return [p if type(p) is int else json_key(p) for p in path]


def path_spelled(path: StatePath) -> tuple[str | int, ...]:
    """`path_to_json` as a tuple: the path itself, if it is spelled so already, as most are."""
    for part in path:
        if type(part) is not str or part.startswith("$"):
            return tuple(path_to_json(path))
    return path


def path_from_json(parts: Sequence[str | int]) -> StatePath:
    """The inverse of `path_to_json`."""
    return tuple(p if isinstance(p, int) else _key(p) for p in parts)


def _key(text: str) -> str | int:
    if not text.startswith("$"):
        return text
    number = text.removeprefix("$int:")
    return (
        IntKey(number) if number != text and _INTEGER.fullmatch(number) else text.removeprefix("$")
    )


class LazyMapping(Mapping[K, T]):
    """A mapping that is read when it is first used."""

    def __init__(self, read: Callable[[], Mapping[K, T]]) -> None:
        self._read = read

    @cached_property
    def _value(self) -> Mapping[K, T]:
        return self._read()

    def __getitem__(self, key: K) -> T:
        return self._value[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


class LazyValues(Mapping[K, T]):
    """A mapping of known keys, each value of which is read when it is asked for."""

    def __init__(self, keys: Iterable[K], read: Callable[[K], T]) -> None:
        self._keys, self._read = dict.fromkeys(keys), read

    def __getitem__(self, key: K) -> T:
        if key not in self._keys:
            raise KeyError(key)
        return self._read(key)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


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

    def __repr__(self) -> str:
        return repr(self._value)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The location of an optimizer group in a program's state: its optimizer's path, and the names of its parameters.

    In `flattened` state dicts the hyper-parameters are stored in an entry for each parameter.
    """

    path: StatePath
    names: tuple[str, ...]
    flattened: bool = False


class Loss(NamedTuple):
    """What an encoding has changed of a tensor since the program had it.

    Attributes:
        encoding: its name.
        absolute: the largest absolute error of an element.
        relative: the largest error relative to the element, of those that were not zero.
    """

    encoding: str
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The metadata of a checkpoint; all but tensor list, paths and means consists of plain JSON values."""

    tensor_list: TensorList
    # tied name -> name of the stored tensor
    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    assets: tuple[str, ...] = ()  # keys of files to keep as they are
    # optimizer groups: hyper-parameters and "params", names in order
    groups: Sequence[Mapping[str, Any]] = ()
    #: The paths of each tensor, and the place of each optimizer group, in the state of the program
    #: that saved; empty if unknown.
    paths: Mapping[Key, tuple[StatePath, ...]] = field(default_factory=dict)
    places: Sequence[GroupPlace | None] = ()
    step: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)  # {"zero": 3, "dp": 4, …}
    # {"name": "deepspeed", "version": "0.19.8", …}
    engine: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()  # keys of all files of the checkpoint
    #: Tensors that are the mean of several stored contributions, which are not in the tensor list.
    means: Mapping[Key, tuple[Key, ...]] = field(default_factory=dict)
    #: Of some of these, which have one contribution: the power of two by which it is divided.
    factors: Mapping[Key, float] = field(default_factory=dict)
    save_id: str = ""  # the writer's unique id of the save, if it has one
    folder: str = ""  # the checkpoint's folder or file if the store's root is above it
    #: Tensors that the checkpoint has and that cannot be read, with the reason. They are not in the
    #: tensor list.
    unreadable: Mapping[Key, str] = field(default_factory=dict)
    fingerprints: Mapping[Key, str | None] = field(default_factory=dict)  # that are recorded
    lossy: Mapping[Key, Loss] = field(default_factory=dict)  # tensors that an encoding has changed
    lossy_allowed: bool = False  # whether the caller wants to read these
    #: Tensors that are older than the checkpoint, with the training step at which they were so.
    older: Mapping[Key, int] = field(default_factory=dict)
    older_allowed: bool = False  # whether the caller wants to read these
    # files that the program writes with those that are there; without them it is usable
    missing: tuple[str, ...] = ()

    @property
    def part_of(self) -> str:
        """What this is only a part of; empty if it is whole."""
        return str(self.layout.get(PART_OF, ""))

    def replace(self, **changes: Any) -> CheckpointMetadata:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def check_exact(metadata: CheckpointMetadata, keys: Iterable[Key], place: str = "") -> None:
    """Check that tensors are as they were when they were saved, unless the caller wants to read others.

    Args:
        place: where the checkpoint is, for the message.

    Raises:
        UnsupportedError: some were encoded with loss, or are older than the checkpoint.
    """
    if metadata.older and not metadata.older_allowed:
        keys = list(keys)
        _check_current(metadata, keys, place)
    if not metadata.lossy or metadata.lossy_allowed:
        return
    worst: dict[tuple[str, str], float] = {}
    for key in keys:
        if (loss := metadata.lossy.get(key)) is not None:
            of_state = (key.state, loss.encoding)
            worst[of_state] = max(worst.get(of_state, 0.0), loss.absolute)
    if worst:
        states = ", ".join(
            f"{state} ({encoding}, off by up to {absolute:.3g})"
            for (state, encoding), absolute in worst.items()
        )
        raise UnsupportedError(
            f"{place}{': ' if place else ''}these states were encoded with loss, and are not what was "
            f"saved: {states}",
            hint="if that is close enough: lossy=True (in load, Manager.restore_latest, an integration or "
            "ucformat.open; --lossy)",
        )


_MAX_NAMED = 5  # tensors in an error


def _check_current(metadata: CheckpointMetadata, keys: Iterable[Key], place: str) -> None:
    older = [key for key in keys if key in metadata.older]
    if older:
        steps = sorted({metadata.older[key] for key in older})
        span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        raise UnsupportedError(
            f"{place}{': ' if place else ''}{first_names(older, _MAX_NAMED)} are as they were at step {span}, "
            f"and the checkpoint is of step {metadata.step}",
            hint="to take the older ones: older=True (ucformat.open; --older); "
            "ucformat.torch.load names them in its report",
        )


def unreadable_error(tensors: Mapping[Key, str], url: str) -> UnsupportedError:
    """The error for tensors that were asked for and that cannot be read."""
    (key, reason), *others = tensors.items()
    further = (
        f"; and so do {len(others)} more of its tensors, which are not read either"
        if others
        else ""
    )
    return UnsupportedError(
        f"{url}: {key} {reason}{further}",
        hint=f"to leave out a tensor, open the checkpoint with the view `drop: [{json.dumps(key.name)}]` (--view, "
        "docs/view.md); `ucp show` lists those that cannot be read",
    )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A range of `nbytes` bytes of a file with its own checksum; `crc32` is None if the writer computed none.

    `locate` returns the offset of its first byte in the file, and may read the file to find it. The
    offset is above `near`, and below the `near` of any later record.
    """

    file: str
    name: str
    nbytes: int
    crc32: int | None
    locate: Callable[[], int]
    near: int = 0


class HasFileRuns(Protocol):
    """A `Readable` whose tensors may lie at the same place of many files."""

    def file_runs(self, key: Key, within: Box) -> Iterable[Extent | Tiles | FileRun]:
        """The extents of `Readable.extents`; those that many files have at the same place are one `FileRun`."""


class Readable(Protocol):
    """The interface for reading tensors of an opened checkpoint of any format, or a view of one."""

    kind: str
    store: Store
    metadata: CheckpointMetadata

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """The extents of one tensor that intersect a box, and perhaps others. Together they cover the box.

        `Tiles` stand for many extents of a regular grid.
        """
