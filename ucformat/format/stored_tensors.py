"""The tensors of a manifest's table, made when they are asked for: a million of them would take a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ucformat.geometry.tensor import Key, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, ItemsView, Iterator, ValuesView

    from ucformat.schema.tensors import TensorTable

T = TypeVar("T")


class ValueByKey(Mapping[Key, T]):
    """A value for each tensor of a table, made when it is asked for; all of them when somebody enumerates values."""

    def __init__(self, table: TensorTable, make: Callable[[int], T]) -> None:
        self._table, self._make = table, make

    @cached_property
    def _keys(self) -> list[Key]:
        table = self._table
        return list(
            map(
                Key,
                map(table.names.__getitem__, table.name),
                table.by_kind(lambda kind: kind.state),
            )
        )

    @cached_property
    def _all(self) -> dict[Key, T]:
        return dict(zip(self._keys, map(self._make, range(len(self._table))), strict=True))

    def __getitem__(self, key: Key) -> T:
        if "_all" in self.__dict__:
            return self._all[key]
        row = self._table.row(*key) if isinstance(key, tuple) and len(key) == 2 else None
        if row is None:
            raise KeyError(key)
        return self._make(row)

    def get(self, key: Key, default: Any = None) -> Any:
        """The value of a tensor; without an error on the way, as for those of which most have none."""
        if "_all" in self.__dict__:
            return self._all.get(key, default)
        row = self._table.row(*key)
        return default if row is None else self._make(row)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._table)

    def values(self) -> ValuesView[T]:
        """The values of all tensors, in order."""
        return self._all.values()

    def items(self) -> ItemsView[Key, T]:
        """The keys and values of all tensors, in order."""
        return self._all.items()

    def __repr__(self) -> str:
        return repr(self._all)


class _StoredStates(Mapping[str, list[str]]):
    """The states in which each name of a table is stored."""

    def __init__(self, table: TensorTable) -> None:
        self._table = table

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(map(self._table.names.__getitem__, dict.fromkeys(self._table.name)))

    def __getitem__(self, name: str) -> list[str]:
        if not (rows := self._table.rows(name)):
            raise KeyError(name)
        return [self._table.kinds[self._table.kind[row]].state for row in rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StoredTensors(Sequence[TensorInfo]):
    """The tensors of a table, in order.

    Attributes:
        by_key: the tensors by name and state.
    """

    def __init__(self, table: TensorTable) -> None:
        def info(row: int) -> TensorInfo:
            kind = table.kinds[table.kind[row]]
            name = table.names[table.name[row]]
            return TensorInfo(name, kind.state, kind.stored_dtype, kind.shape)

        self.by_key: Mapping[Key, TensorInfo] = ValueByKey(table, info)
        self.states: Mapping[str, list[str]] = _StoredStates(table)
        self._info, self._rows = info, range(len(table))

    @overload
    def __getitem__(self, index: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorInfo, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorInfo | tuple[TensorInfo, ...]:
        if isinstance(index, slice):
            return tuple(map(self._info, self._rows[index]))
        return self._info(self._rows[index])

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.by_key.values())

    def __len__(self) -> int:
        return len(self._rows)


def index_tensors(
    tensors: Sequence[TensorInfo],
) -> tuple[Mapping[Key, TensorInfo], Mapping[str, list[str]]]:
    """Tensors by name and state, and the states of each name."""
    if isinstance(tensors, StoredTensors):
        return tensors.by_key, tensors.states
    infos, states = {info.key: info for info in tensors}, dict[str, list[str]]()
    for key in infos:
        states.setdefault(key.name, []).append(key.state)
    return infos, states
