"""The differences between two checkpoints, from the catalog alone: no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

from ucformat.catalog.content import load_tensors
from ucformat.catalog.loading import load_entries
from ucformat.schema import FINGERPRINT

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from ucformat.catalog.content import ListedTensor
    from ucformat.catalog.entries import Entry

Aspect = Literal["shape", "dtype", "digest", "grid"]


class MissingType(Enum):
    """The type of MISSING."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return self.name


#: Marks a value that a checkpoint does not have, which is not the same as None.
MISSING: Final = MissingType.MISSING


@dataclass(frozen=True, slots=True)
class Changed:
    """A value that differs between `a` and `b`; its path is written as in filters: `optimizer.betas.0`."""

    path: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs between `a` and `b`, in these aspects."""

    name: str
    state: str
    aspects: tuple[Aspect, ...]
    a: ListedTensor
    b: ListedTensor


@dataclass(frozen=True, slots=True)
class TensorsDiff:
    """The differences between the tensors of two checkpoints.

    `same` tensors have the same fingerprint, or digest. `unknown` ones have the same shape and
    dtype, but one has neither, or only digests, which depend on chunk grids, of different ones.
    """

    added: tuple[ListedTensor, ...]
    removed: tuple[ListedTensor, ...]
    changed: tuple[TensorChange, ...]
    unknown: int
    same: int

    @property
    def equal(self) -> bool:
        """Whether all tensors are known to be the same."""
        return not (self.added or self.removed or self.changed or self.unknown)


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences from checkpoint `a` to checkpoint `b`; changes are sorted by path."""

    a: Entry
    b: Entry
    config: tuple[Changed, ...]
    topology: tuple[Changed, ...]
    producer: tuple[Changed, ...]
    metrics: tuple[Changed, ...]
    tensors: TensorsDiff

    @property
    def equal(self) -> bool:
        """Whether nothing that is compared here differs, and all tensors are known to be the same.

        Id, kind, run, step, times, places and annotations other than metrics are not compared.
        """
        return self.tensors.equal and not (
            self.config or self.topology or self.producer or self.metrics
        )


def diff(connection: Connection, a_serial: int, b_serial: int, now: datetime) -> Diff:
    """Compare two checkpoints."""
    a, b = (load_entries(connection, [serial], now)[0] for serial in (a_serial, b_serial))
    return Diff(
        a,
        b,
        _changes(a.config, b.config),
        _changes(a.topology, b.topology),
        _changes(a.producer, b.producer),
        _changes(a.metrics, b.metrics),
        _tensors(load_tensors(connection, a_serial), load_tensors(connection, b_serial)),
    )


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Changed, ...]:
    left, right = _leaves(a), _leaves(b)
    paths = sorted(
        {**left, **right}, key=lambda path: [(isinstance(part, str), part) for part in path]
    )
    pairs = ((p, left.get(p, MISSING), right.get(p, MISSING)) for p in paths)
    return tuple(Changed(_spelled(p), x, y) for p, x, y in pairs if not _same(x, y))


def _leaves(document: Mapping[str, Any]) -> dict[tuple[str | int, ...], Any]:
    """All values that are not containers, by path; without recursion, since documents may nest deeply."""
    leaves: dict[tuple[str | int, ...], Any] = {}
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while todo:
        path, value = todo.pop()
        below: Any = ()
        # a number that JSON cannot express
        if isinstance(value, Mapping) and list(value) != ["$float"]:
            below = value.items()
        elif isinstance(value, list):
            below = enumerate(value)
        if below and value:
            todo.extend(((*path, key), v) for key, v in below)
        elif path:
            leaves[path] = value
    return leaves


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal. 1 equals 1.0, which databases do not distinguish, but not True; NaN equals NaN."""
    if isinstance(a, bool) is not isinstance(b, bool):
        return False
    return bool(a == b or (a != a and b != b))


def _spelled(path: tuple[str | int, ...]) -> str:
    """The path as it follows `config.` in a filter."""
    from ucformat.catalog.filter.syntax import spell  # which two equal checkpoints do not need

    return spell(("config", *map(str, path))).removeprefix("config.")


def _tensors(a: list[ListedTensor], b: list[ListedTensor]) -> TensorsDiff:
    left, right = ({(t.name, t.state): t for t in side} for side in (a, b))
    changed, unknown, same = [], 0, 0
    for key, x in left.items():
        y = right.get(key)
        if y is None:
            continue
        aspects = _aspects(x, y)
        if aspects:
            changed.append(TensorChange(x.name, x.state, aspects, x, y))
        elif x.digest is not None and x.digest == y.digest:
            same += 1
        else:
            unknown += 1
    added = tuple(t for key, t in right.items() if key not in left)
    removed = tuple(t for key, t in left.items() if key not in right)
    return TensorsDiff(added, removed, tuple(changed), unknown, same)


def _aspects(a: ListedTensor, b: ListedTensor) -> tuple[Aspect, ...]:
    """The aspects in which two tensors certainly differ; another grid alone is no difference."""
    differ: dict[Aspect, bool] = {
        "shape": a.shape != b.shape,
        "dtype": a.dtype != b.dtype,
        "digest": _comparable(a, b) and a.digest != b.digest,
    }
    if not any(differ.values()):
        return ()
    differ["grid"] = (a.chunk, a.shard) != (b.chunk, b.shard)
    return tuple(aspect for aspect, is_different in differ.items() if is_different)


def _comparable(a: ListedTensor, b: ListedTensor) -> bool:
    """Whether both have fingerprints, or digests of the same kind over the same chunks."""
    if a.digest is None or b.digest is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    kinds = {digest.partition(":")[0] for digest in (a.digest, b.digest)}
    return len(kinds) == 1 and (a.chunk == b.chunk or a.digest.startswith(FINGERPRINT))
