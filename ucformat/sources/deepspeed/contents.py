"""Shared by the readers of the ZeRO stages: the ranks' files, opened on demand, and checked values from them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.sources.index import Group
from ucformat.sources.pickle.stand_ins import Inert, StoredTensor
from ucformat.sources.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.sources.pickle.file import TorchFile

__all__ = [
    "Group",
    "Ranks",
    "hyper_parameters",
    "load_all",
    "need",
    "read_scalars",
    "scalars",
    "stage_of",
    "state_of",
    "stored",
    "zero_options",
]

T = TypeVar("T")


class Ranks(ABC, Generic[T]):
    """The files of all ranks, opened and parsed on demand.

    Opening the checkpoint opens the first rank's file, and a request those that it needs. A request that continues
    where earlier ones ended also opens as many further files as are open already, because the caller then walks the
    whole checkpoint.
    """

    def __init__(self, keys: Sequence[str], load: Callable[[str], TorchFile]) -> None:
        self.keys, self._load_file = keys, load
        self._open: dict[int, T] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def _parse(self, rank: int, file: TorchFile) -> T:
        """Parse and check a rank's file."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, rank: int) -> T:
        return self.get((rank,))[rank]

    def get(self, wanted: Iterable[int]) -> Mapping[int, T]:
        """The parsed files of these ranks (and of others that are open), by rank.

        Args:
            wanted: the ranks.
        """
        with self._lock:
            missing = [rank for rank in wanted if rank not in self._open]
            if missing:
                if missing[0] - 1 in self._open:
                    ahead = range(missing[-1] + 1, min(missing[-1] + 1 + len(self._open), len(self)))
                    missing += [rank for rank in ahead if rank not in self._open]
                self._load(missing)
            return self._open

    def all(self) -> list[T]:
        """Every rank's file, in order."""
        opened = self.get(range(len(self)))
        return [opened[rank] for rank in range(len(self))]

    def _load(self, ranks: list[int]) -> None:
        def load(rank: int) -> T:
            return self._parse(rank, self._load_file(self.keys[rank]))

        self._open |= zip(ranks, map_io(load, ranks), strict=True)


def load_all(load: Callable[[str], TorchFile], rows: Iterable[Sequence[str]]) -> list[list[TorchFile]]:
    """Open the files of a grid of keys concurrently.

    Args:
        load: opens one file.
        rows: the keys; rows may differ in length.

    Returns:
        the files in rows as `rows`.
    """
    rows = list(rows)
    keys = [key for row in rows for key in row]
    opened = iter(map_io(load, keys))
    return [[next(opened) for _ in row] for row in rows]


def need(mapping: Any, key: str, kind: type | tuple[type, ...], file: str) -> Any:
    """A required entry of a dictionary.

    Args:
        mapping: the dictionary; any other value has no entries.
        key: the key of the entry.
        kind: the type or types that are accepted.
        file: the file's key, for messages.

    Raises:
        IntegrityError: the entry is missing or of another type.
    """
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, kind):
        raise IntegrityError(
            f"{file} has no usable {key!r} ({type(value).__name__})",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def state_of(found: dict[Any, Any], index: Any, file: str) -> dict[str, Any]:
    """The optimizer states of one entry, by name; empty if the entry has none.

    Args:
        found: the states of all entries.
        index: the entry's number or name.
        file: the file's key, for messages.

    Raises:
        IntegrityError: the states are not a dictionary by names.
    """
    value = found.get(index, {}) if isinstance(index, int | str) else None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise IntegrityError(
            f"{file} has no usable optimizer states of the entry {index!r:.80}",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def stored(value: Any, label: str, file: str) -> StoredTensor:
    """A value that must be a tensor.

    Args:
        value: an unpickled value.
        label: names the value in messages.
        file: the file's key, for messages.

    Raises:
        IntegrityError: it is not a tensor.
    """
    if not isinstance(value, StoredTensor):
        raise IntegrityError(f"{label} in {file} is a {type(value).__name__} instead of a tensor")
    return value


def zero_options(value: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` of the DeepSpeed configuration in a file; empty if there is none.

    Args:
        value: the file's value.
    """
    config = value.get("ds_config")
    options = config.get("zero_optimization") if isinstance(config, dict) else None
    return options if isinstance(options, dict) else {}


def stage_of(value: Any) -> int | None:
    """The ZeRO stage, from 0 to 3, that an optimizer's `zero_stage` names; None if unknown.

    Args:
        value: a number, or a member of DeepSpeed's enumeration.
    """
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    names = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    stage = names.get(value) if isinstance(value, str) else value
    return stage if isinstance(stage, int) else None


def hyper_parameters(group: Any, file: TorchFile) -> dict[str, Any]:
    """The hyper-parameters of an optimizer group, as JSON.

    Args:
        group: the entry of `param_groups`.
        file: the file that contains it.

    Raises:
        IntegrityError: the group is not a dictionary.
    """
    if not isinstance(group, dict):
        raise IntegrityError(f"an optimizer group in {file.key} is a {type(group).__name__}")
    plain: dict[str, Any] = to_json(
        {k: v for k, v in group.items() if k != "params"}, read=file.read, path="param_groups"
    )
    return plain


def scalars(file: TorchFile, state: dict[str, Any], dropped: frozenset[str]) -> dict[str, Any]:
    """All values of an optimizer file except its parameters' tensors and the dropped keys.

    Args:
        file: the optimizer file.
        state: its `optimizer_state_dict`.
        dropped: the keys of `state` to omit.
    """
    known = ("optimizer_state_dict", "ds_config", "ds_version")  # the last two are in the model states too
    around = {k: v for k, v in file.value.items() if k not in known}
    return {**around, **{k: v for k, v in state.items() if k not in dropped}}


def read_scalars(file: TorchFile, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, bytes]]:
    """Read the 0-d tensors among an optimizer's states, as bytes by state.

    Args:
        file: the optimizer file.
        groups: the states of each flat group.
    """
    return [
        {n: file.read(v) for n, v in states.items() if isinstance(v, StoredTensor) and not v.shape} for states in groups
    ]


def refuse_flat_state(state: str, tensor: StoredTensor, group: int, file: str) -> UnsupportedError:
    """The error for an optimizer state that is neither as long as the flat group nor a scalar.

    Args:
        state: the state's name.
        tensor: the state.
        group: number of the flat group.
        file: the file's key.
    """
    return UnsupportedError(
        f"{file}: the optimizer state {state!r} of group {group} has shape {tensor.shape}, which does not match the "
        "group's parameters; such optimizers are not yet read"
    )
