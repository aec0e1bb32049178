"""Shared by the readers of the ZeRO stages: the ranks' files, opened on demand, and checked values from them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.sources.pickle.stand_ins import Inert, StoredTensor
from ucformat.sources.values import to_json
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.sources.pickle.file import TorchFile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's optimizer file: for each flat group its part of the master and of the states."""

    file: TorchFile
    masters: list[StoredTensor]
    states: list[dict[str, Any]]

    def values(self) -> list[dict[str, Any]]:
        """All of a group's values by name, for each group."""
        return [{"master": m, **s} for m, s in zip(self.masters, self.states, strict=True)]


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
        """The parsed files of these ranks (and of others that are open), by rank."""
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
    """Open the files of a grid of keys concurrently."""
    rows = list(rows)
    keys = [key for row in rows for key in row]
    opened = iter(map_io(load, keys))
    return [[next(opened) for _ in row] for row in rows]


def need(mapping: Any, key: str, kind: type | tuple[type, ...], file: str) -> Any:
    """A required entry of a dictionary."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, kind):
        raise IntegrityError(
            f"{file} has no usable {key!r} ({type(value).__name__})",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def state_of(found: dict[Any, Any], index: Any, file: str) -> dict[str, Any]:
    """The optimizer states of one entry, by name; empty if the entry has none."""
    value = found.get(index, {}) if isinstance(index, int | str) else None
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise IntegrityError(
            f"{file} has no usable optimizer states of the entry {index!r:.80}",
            hint="the file is damaged, or of a version of DeepSpeed that ucformat does not know",
        )
    return value


def stored(value: Any, label: str, file: str) -> StoredTensor:
    """A value that must be a tensor."""
    if not isinstance(value, StoredTensor):
        raise IntegrityError(f"{label} in {file} is a {type(value).__name__} instead of a tensor")
    return value


def zero_options(value: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` of the DeepSpeed configuration in a file; empty if there is none."""
    config = value.get("ds_config")
    options = config.get("zero_optimization") if isinstance(config, dict) else None
    return options if isinstance(options, dict) else {}


def stage_of(value: Any) -> int | None:
    """The ZeRO stage, from 0 to 3, that an optimizer's `zero_stage` names; None if unknown."""
    if isinstance(value, Inert) and value.args:
        value = value.args[0]
    names = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    stage = names.get(value) if isinstance(value, str) else value
    return stage if isinstance(stage, int) else None


def hyper_parameters(group: Any, file: TorchFile) -> dict[str, Any]:
    """The hyper-parameters of an optimizer group, as JSON."""
    if not isinstance(group, dict):
        raise IntegrityError(f"an optimizer group in {file.key} is a {type(group).__name__}")
    plain: dict[str, Any] = to_json(
        {k: v for k, v in group.items() if k != "params"}, read=file.read, path="param_groups"
    )
    return plain


def scalars(file: TorchFile, state: dict[str, Any], dropped: frozenset[str]) -> dict[str, Any]:
    """All values of an optimizer file except its parameters' tensors and the dropped keys."""
    known = ("optimizer_state_dict", "ds_config", "ds_version")  # the last two are in the model states too
    around = {k: v for k, v in file.value.items() if k not in known}
    return {**around, **{k: v for k, v in state.items() if k not in dropped}}


def read_scalars(partition: Partition) -> list[dict[str, bytes]]:
    """Read the 0-d tensors among an optimizer's states, as bytes by state, for each flat group."""
    return [
        {
            n: partition.file.read(v)
            for n, v in states.items()
            if isinstance(v, StoredTensor) and not v.shape and v.readable
        }
        for states in partition.states
    ]


def check_same_states(partition: Partition, first: Partition, scalars: Sequence[Mapping[str, bytes]]) -> None:
    """Check that two ranks have the same optimizer states and scalars (`step`), as far as these can be read."""
    for index, (mine, theirs) in enumerate(zip(first.values(), partition.values(), strict=True)):
        if mine.keys() != theirs.keys() or not all(_alike(v, theirs[n]) for n, v in mine.items()):
            raise IntegrityError(
                f"{partition.file.key} has other optimizer states of group {index} than {first.file.key}: "
                f"{_described(theirs)} instead of {_described(mine)}"
            )
    for expected, recorded in zip(scalars, read_scalars(partition), strict=True):
        if any(expected[n] != recorded[n] for n in expected.keys() & recorded.keys()):
            raise IntegrityError(
                f"{partition.file.key}: an optimizer scalar (`step`) differs from that in {first.file.key}",
                hint="files of different saves are mixed in one folder",
            )


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are tensors of one dtype and number of dims, or of one type; what cannot be read may be."""
    if not isinstance(one, StoredTensor) or not isinstance(other, StoredTensor):
        return type(one) is type(other)
    same = one.dtype == other.dtype or not (one.readable and other.readable)
    return same and len(one.shape) == len(other.shape)


def _described(states: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} ({v.dtype if isinstance(v, StoredTensor) else type(v).__name__})" for n, v in states.items())


def refuse_flat_state(state: str, tensor: StoredTensor, group: int, file: str) -> UnsupportedError:
    """The error for an optimizer state that is neither as long as the flat group nor a scalar."""
    return UnsupportedError(
        f"{file}: the optimizer state {state!r} of group {group} has shape {tensor.shape}, which does not match the "
        "group's parameters; such optimizers are not yet read"
    )
