"""A rank's read plan: its cost, and the arrays that it fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.box import bounding_box
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import check_out, memory_of, read_planned
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.reading.readable import TRACKERS, check_exact
from ucformat.storage.cache.scope import read_consistently
from ucformat.storage.wrappers import checking_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.bound import BoundLayout, LocalTensor
    from ucformat.geometry.layout import Layout
    from ucformat.geometry.tensor import Piece
    from ucformat.reading.execute import Memory
    from ucformat.reading.plan import Plan, Verify
    from ucformat.reading.readable import HasFileRuns, Readable
    from ucformat.storage.base import Store

__all__ = [
    "LOAD_INVALID",
    "Bound",
    "RankBuffer",
    "ReadPlan",
    "amplification",
    "item_for",
    "plan_data",
    "plan_rank",
    "size_text",
]

#: The consequence, in error messages, of files that changed while tensors were loaded.
LOAD_INVALID = "the loaded values are invalid"


@dataclass(frozen=True, slots=True)
class RankBuffer:
    """Memory that a plan fills: one tensor's local array, or a flat buffer that several tensors share."""

    key: tuple[str, str]
    dtype: str
    shape: tuple[int, ...]
    padded: bool  # part of it is filled by no tensor and stays zero

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return int(np.prod(self.shape, dtype=np.int64)) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ReadPlan:
    """What one rank reads; created without any I/O on tensors, run by `execute`."""

    plan: Plan
    store: Store
    buffers: tuple[RankBuffer, ...]
    tensors: Mapping[Key, LocalTensor]
    zero_filled: Mapping[Key, int]  # elements of padding that no file stores
    rank: int
    _items: Sequence[ReadItem] = field(default=(), repr=False, compare=False)

    def pieces(self) -> list[list[tuple[TensorInfo, Piece]]]:
        """For each buffer the stored tensors that fill it, each with a piece that is placed in the buffer."""
        out: list[list[tuple[TensorInfo, Piece]]] = [[] for _ in self.buffers]
        for item in self._items:
            for number, piece in item.pieces:
                out[number].append((item.info, piece))
        return out

    @property
    def bytes_needed(self) -> int:
        """Bytes of the tensors' elements that this rank holds."""
        return self.plan.bytes_needed

    @property
    def bytes_read(self) -> int:
        """Bytes that will be read from storage, checksums and gaps included."""
        return self.plan.bytes_read

    @property
    def bytes_unverified(self) -> int:
        """Bytes needed that are not covered by a verified checksum."""
        return self.plan.bytes_unverified

    @property
    def bytes_besides(self) -> int:
        """Bytes that will be read only to verify checksums: the checksums, and the rest of the bytes they cover."""
        return self.plan.bytes_besides

    @property
    def requests(self) -> int:
        """Number of ranges that will be read."""
        return self.plan.ranges

    @property
    def files(self) -> dict[str, int]:
        """Bytes that will be read from each file."""
        return self.plan.files

    @property
    def memory(self) -> int:
        """Bytes of the arrays that `execute` fills."""
        return sum(b.nbytes for b in self.buffers)

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank}: {len(self.tensors)} tensors, {size_text(self.memory)} of memory",
            f"  needed      {size_text(self.bytes_needed)}",
            f"  read        {size_text(self.bytes_read)}  ({_of_needed(self)})",
            (
                f"  unverified  {size_text(self.bytes_unverified)}; {size_text(self.bytes_besides)} are read "
                "for checksums alone"
            ),
            f"  requests    {self.requests} in {len(self.files)} files",
        ]
        if self.zero_filled:
            lines.append(f"  zero-filled {sum(self.zero_filled.values())} elements of padding")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from ucformat.drawing import card

        facts = {
            "tensors": len(self.tensors),
            "memory": size_text(self.memory),
            "needed": size_text(self.bytes_needed),
            "read": f"{size_text(self.bytes_read)} ({_of_needed(self)})",
            "unverified": size_text(self.bytes_unverified),
            "for checksums alone": size_text(self.bytes_besides),
            "requests": f"{self.requests} in {len(self.files)} files",
            "zero-filled": sum(self.zero_filled.values()) or None,
        }
        rows = [
            (file, size_text(nbytes))
            for file, nbytes in sorted(self.files.items(), key=lambda pair: -pair[1])
        ]
        return card(f"What rank {self.rank} reads", facts, ("file", "read"), rows, more="files")

    def execute(
        self,
        into: Mapping[tuple[str, str], NDArray[np.generic]] | None = None,
        *,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> dict[tuple[str, str], NDArray[np.generic]]:
        """Read directly into the arrays, which are returned by (name, state).

        Tensors in a flat buffer are views of it, and the buffer itself is returned by (buffer,
        state), such as `("flat:0", "exp_avg")`. Padding is zero if the checkpoint does not store
        it.

        Args:
            into: contiguous arrays to fill, by the keys of `buffers`; the others are allocated
                (default: all).
            threads: number of reading threads (None: as many as suit the store).
            progress: called with the number of bytes of each finished request.

        Raises:
            Conflict: a file of the checkpoint changed since it was opened; the values in the arrays
                are invalid.
            UsageError: an array of `into` does not fit, or shares memory with another; nothing was
                written.
        """
        targets = dict(into or {})
        _check_targets(targets, self.buffers, self.rank)
        arrays: list[NDArray[np.generic]] = []

        def memories() -> list[Memory]:
            arrays[:] = [_array(b, targets.get(b.key)) for b in self.buffers]
            return [memory_of(a) for a in arrays]

        def read() -> None:
            labels = [" ".join(b.key) for b in self.buffers]
            with checking_unchanged(self.store, LOAD_INVALID, TRACKERS):
                read_planned(self.plan, self.store, memories, labels, threads, progress)

        read_consistently(read)
        out: dict[tuple[str, str], NDArray[np.generic]] = {}
        for b, a in zip(self.buffers, arrays, strict=True):
            out[b.key] = a
        for key, local in self.tensors.items():
            if local.buffer is not None:
                out[key.name, key.state] = out[local.buffer, key.state][
                    local.offset : local.offset + local.size
                ]
        return out


def _check_targets(
    targets: Mapping[tuple[str, str], NDArray[np.generic]], buffers: Sequence[RankBuffer], rank: int
) -> None:
    by_key = {b.key: b for b in buffers}
    runs = []
    for key, array in targets.items():
        if key not in by_key:
            raise UsageError(
                f"rank {rank} has no buffer {key}",
                hint=(
                    "`plan.buffers` lists the keys; tensors in a flat buffer are filled through "
                    "the buffer"
                ),
            )
        label = f"{key[0]} ({key[1]})"
        check_out(array, by_key[key].dtype, by_key[key].shape, label)
        if not array.flags.c_contiguous:
            raise UsageError(
                f"{label}: the array to fill is not contiguous",
                hint="a single tensor may be: t.read(out=)",
            )
        runs.append((array.ctypes.data, array.nbytes, label))
    runs.sort()
    for (begin, nbytes, first), (start, _, second) in pairwise(r for r in runs if r[1]):
        if begin + nbytes > start:
            raise UsageError(
                f"the arrays to fill for {first} and {second} share memory",
                hint="pass separate arrays",
            )


def _array(b: RankBuffer, target: NDArray[np.generic] | None) -> NDArray[np.generic]:
    """The array to fill for a buffer: the given one, zeroed if padded, or a new one."""
    dtype = numpy_dtype(b.dtype)
    if target is None:
        return np.zeros(b.shape, dtype) if b.padded else np.empty(b.shape, dtype)
    if b.padded:
        target[...] = np.zeros((), dtype)
    return target


@dataclass(frozen=True, slots=True)
class Bound:
    """A layout bound to a checkpoint's tensors; `stored` maps the layout's names to the tensors as stored."""

    layout: BoundLayout
    stored: Mapping[Key, TensorInfo]

    @classmethod
    def of(cls, tensor_list: TensorList, layout: Layout, states: Sequence[str] | None) -> Bound:
        """Bind a layout to the tensors of a checkpoint.

        Args:
            states: the states to read (None: all, without stored padding, which is placed with the
                tensor it pads).
        """
        tensor_list = _chosen(tensor_list, states)
        stored = {Key(layout.rename(i.name), i.state): i for i in tensor_list.tensors}
        if len(stored) != len(tensor_list.tensors):
            raise UsageError(
                "the layout's renames give two tensors one name",
                hint="rename them to different names",
            )
        return cls(layout.bind(tensor_list.renamed(layout.rename)), stored)


def plan_rank(
    source: Readable, bound: Bound, rank: int, verify: Verify, most_boxes: int | None = None
) -> ReadPlan:
    """Plan what a rank reads, in so many boxes of tensors at most."""
    ranks = bound.layout.ranks
    if not 0 <= rank < ranks:
        raise UsageError(
            f"there is no rank {rank}", hint=f"the layout has the ranks 0 to {ranks - 1}"
        )
    return _Planner(source, bound.layout, rank, bound.stored, most_boxes).plan(verify)


def item_for(source: Readable, info: TensorInfo, pieces: Sequence[tuple[int, Piece]]) -> ReadItem:
    """The read item for pieces of a tensor, with the extents that they need.

    All that users read passes here.

    Raises:
        UnsupportedError: the tensor was encoded with loss, and the caller has not allowed that.
    """
    check_exact(source.metadata, (info.key,), source.store.url)
    near = bounding_box(piece.box for _, piece in pieces)
    # Not `isinstance`, which takes longer for a protocol than finding the extents.
    find = cast("HasFileRuns", source).file_runs if hasattr(source, "file_runs") else source.extents
    return ReadItem(info, () if near is None else find(info.key, near), pieces)


def _chosen(tensor_list: TensorList, states: Sequence[str] | None) -> TensorList:
    if states is None:
        return tensor_list.placed()
    tensors = tuple(i for i in tensor_list.tensors if i.state in states)
    unknown = set(states) - {i.state for i in tensors}
    if unknown:
        available = ", ".join(sorted({i.state for i in tensor_list.tensors}))
        raise UsageError(
            f"no tensor is stored in state {min(unknown)!r}", hint=f"there are: {available}"
        )
    return TensorList(tensors, tensor_list.groups)


class _Planner:
    """Allocates one rank's buffers, and collects the pieces to read."""

    def __init__(
        self,
        source: Readable,
        bound: BoundLayout,
        rank: int,
        stored: Mapping[Key, TensorInfo],
        most_boxes: int | None,
    ) -> None:
        self.most_boxes, self.boxes = most_boxes, 0
        self.source, self.bound, self.rank, self.stored = source, bound, rank, stored
        self.infos = {i.key: i for i in source.metadata.tensor_list.tensors}
        self.buffers = [
            RankBuffer(k, b.dtype, (b.size,), padded=True) for k, b in bound.buffers(rank).items()
        ]
        self.numbers = {b.key: n for n, b in enumerate(self.buffers)}
        self.tensors: dict[Key, LocalTensor] = {}
        self.zero_filled: dict[Key, int] = {}

    def plan(self, verify: Verify) -> ReadPlan:
        items = [w for key in self.bound.keys(self.rank) for w in self._items(key)]
        plan = make_plan(items, verify, self.source.store.costs).through(self.source.store)
        buffers = tuple(self.buffers)
        return ReadPlan(
            plan, self.source.store, buffers, self.tensors, self.zero_filled, self.rank, items
        )

    def _items(self, key: Key) -> list[ReadItem]:
        local = self.bound.local(key, self.rank)
        if local is None:
            return []
        info = self.stored[key]
        self.boxes += len(local.pieces) + len(local.padding)
        if self.most_boxes is not None and self.boxes > self.most_boxes:
            raise UnsupportedError(
                f"rank {self.rank} has more than {self.most_boxes:,} boxes of tensors in this layout",
                hint="`ucp plan` has no such limit; or plan some `states`",
            )
        number = self._buffer(key, info, local)
        self.tensors[key] = local
        items = [item_for(self.source, info, [(number, p) for p in local.pieces])]
        if local.padding:
            expected = self.bound.padding(key)
            stored_padding = self.infos.get(info.key.padding)
            if (
                expected is not None
                and stored_padding is not None
                and (stored_padding.shape, stored_padding.dtype) == (expected.shape, expected.dtype)
            ):
                items.append(
                    item_for(self.source, stored_padding, [(number, p) for p in local.padding])
                )
            else:
                self.zero_filled[key] = sum(p.box.size for p in local.padding)
        return items

    def _buffer(self, key: Key, info: TensorInfo, local: LocalTensor) -> int:
        if local.buffer is not None:
            return self.numbers[local.buffer, key.state]
        self.buffers.append(
            RankBuffer((key.name, key.state), info.dtype, local.shape, padded=bool(local.padding))
        )
        return len(self.buffers) - 1


def amplification(plan: ReadPlan) -> float | None:
    """How many bytes are read for each that is needed; None if none is."""
    return plan.bytes_read / plan.bytes_needed if plan.bytes_needed else None


def _of_needed(plan: ReadPlan) -> str:
    ratio = amplification(plan)
    return f"{1.0 if ratio is None else ratio:.3f} of what is needed"


def plan_data(plan: ReadPlan) -> dict[str, Any]:
    """What a rank reads as JSON, the same in `ucp plan` and in answers of the server."""
    return {
        "rank": plan.rank,
        "tensors": len(plan.tensors),
        "memory": plan.memory,
        "bytes_needed": plan.bytes_needed,
        "bytes_read": plan.bytes_read,
        "bytes_unverified": plan.bytes_unverified,
        "bytes_besides": plan.bytes_besides,
        "requests": plan.requests,
        "zero_filled": sum(plan.zero_filled.values()),
        "files": dict(plan.files),
    }


def size_text(nbytes: int) -> str:
    """A number of bytes for humans: `1.5 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
