"""Compares the values of two checkpoints, or of the inputs of means, in bounded memory."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.run import default_workers, run
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import ReadOptions, read_flat, read_items
from ucformat.reading.plan import ReadItem
from ucformat.reading.values import to_json
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.storage.base import Store
    from ucformat.views.viewed import ComputedFile, Viewed

    Floats = NDArray[np.float64]
    Progress = Callable[[int, int], None]
    _Reader = Callable[[Box, NDArray[np.uint8]], NDArray[Any]]

_SLICE = 1 << 17  # elements that are compared at once as float64


@dataclass(frozen=True, slots=True)
class Counts:
    """The differences of some elements, which can be added up; the fields are those of `TensorDifference`."""

    differing: int = 0
    nan_mismatches: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.differing + other.differing,
            self.nan_mismatches + other.nan_mismatches,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
        )


def compare_values(a: NDArray[Any], b: NDArray[Any]) -> Counts:
    """Compare two flat arrays of equal length.

    Of equal dtypes by their bits, else by their values, where NaN is NaN.
    """
    compare = _bits if a.dtype == b.dtype else _values
    counts = Counts()
    with np.errstate(all="ignore"):  # infinities and NaNs are among the differences
        for i in range(0, a.size, _SLICE):
            counts += compare(a[i : i + _SLICE], b[i : i + _SLICE])
    return counts


def _bits(a: NDArray[Any], b: NDArray[Any]) -> Counts:
    unit = min(a.itemsize, 8)
    x, y = (v.view(f"u{unit}").reshape(v.size, -1) for v in (a, b))
    differ = _any_part(x != y)
    if not differ.any():
        return Counts()
    a, b = a[differ], b[differ]
    if a.dtype.kind in "iu" and a.itemsize == 8:
        return _distance(_parts(a), _parts(b), _exact(a, b))
    return _distance(_parts(a), _parts(b))


def _values(a: NDArray[Any], b: NDArray[Any]) -> Counts:
    x, y = _parts(a), _parts(b)
    if x.shape[1] != y.shape[1]:  # one of them is complex
        x, y = (v if v.shape[1] == 2 else np.column_stack([v, np.zeros_like(v)]) for v in (x, y))
    differ = _any_part((x != y) & ~(np.isnan(x) & np.isnan(y)))
    return _distance(x[differ], y[differ]) if differ.any() else Counts()


def _any_part(parts: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of which elements a part is true; ten times as fast as `any(axis=1)` of so few columns."""
    return parts[:, 0] if parts.shape[1] == 1 else parts[:, 0] | parts[:, 1]


def _parts(a: NDArray[Any]) -> Floats:
    """The real part of each element, and the imaginary one where it has one."""
    if a.dtype.kind == "c":
        return a.astype(np.complex128).view(np.float64).reshape(-1, 2)
    return a.astype(np.float64).reshape(-1, 1)


def _exact(a: NDArray[Any], b: NDArray[Any]) -> Floats:
    """The distances of integers of 64 bits, which float64 cannot hold: as unsigned ones they wrap around to it."""
    high, low = np.maximum(a, b), np.minimum(a, b)
    distances: Floats = (high.view(np.uint64) - low.view(np.uint64)).astype(np.float64)
    return distances


def _distance(a: Floats, b: Floats, distances: Floats | None = None) -> Counts:
    """Of elements that differ: parts of each, and distances where they are known already."""
    nan_a, nan_b = (_any_part(np.isnan(v)) for v in (a, b))
    numbers = ~(nan_a | nan_b)
    if distances is None:
        # Infinities of one sign are no distance apart, though their difference is not a number.
        distances = _modulus(np.where(a == b, 0.0, a - b))
    distances = distances[numbers]
    largest = np.maximum(_modulus(a), _modulus(b))[numbers]
    relative = np.where(
        np.isinf(distances), np.inf, distances / np.where(largest == 0, 1.0, largest)
    )
    return Counts(
        len(a),
        int(np.count_nonzero(nan_a != nan_b)),
        float(distances.max(initial=0.0)),
        float(relative.max(initial=0.0)),
    )


def _modulus(parts: Floats) -> Floats:
    moduli: Floats = (
        np.abs(parts[:, 0]) if parts.shape[1] == 1 else np.hypot(parts[:, 0], parts[:, 1])
    )
    return moduli


_BLOCK = 16 << 20  # bytes of a tensor in a worker's memory at once
_LARGEST = max(ITEMSIZE.values())
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far a tensor of one checkpoint is from that of another.

    Attributes:
        equal: whether they are of one dtype, and equal bit for bit.
        differing: elements whose bits differ; of different dtypes, those whose values do, where NaN
            equals NaN.
        nan_mismatches: elements of which one is NaN and the other is not.
        max_abs: the largest |a - b| of the others, as float64; of integers the exact one, rounded
            once.
        max_rel: the largest |a - b| / max(|a|, |b|) of the others; 0 where both are 0, infinite
            where |a - b| is.
        by_digest: whether their digests or fingerprints are equal, so that neither was read.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    equal: bool
    differing: int
    nan_mismatches: int
    max_abs: float
    max_rel: float
    by_digest: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def compare(
    a: str | PathLike[str] | Store | Checkpoint,
    b: str | PathLike[str] | Store | Checkpoint,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    names: Collection[str] | None = None,
) -> Iterator[TensorDifference]:
    """Compare every tensor that both checkpoints hold in the same state and shape, in the order of the first.

    Tied tensors are found under all their names. Tensors with equal digests or fingerprints are not read. Memory:
    less than 64 MiB for each worker, whatever the sizes of the tensors.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    left, right = (ck if isinstance(ck, Checkpoint) else open_checkpoint(ck) for ck in (a, b))
    pairs = [p for p in pairs_of(left, right, names) if p.a.shape == p.b.shape]
    return _differences(pairs, workers or min(_WORKERS, default_workers()), progress)


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor as each checkpoint stores it.

    Attributes:
        same_digest: whether their digests or fingerprints are equal.
        chunk: cut at the edges of these, its chunks are read whole, and so verified.
    """

    key: Key
    a: TensorInfo
    b: TensorInfo
    checkpoints: tuple[Checkpoint, Checkpoint]
    same_digest: bool
    chunk: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes that a comparison reads."""
        return 0 if self.same_digest else self.a.nbytes + self.b.nbytes

    def boxes(self) -> list[Box]:
        """The boxes that are compared at once."""
        if self.same_digest:
            return []
        return list(_boxes(self.a.shape, max(self.a.itemsize, self.b.itemsize), self.chunk))


def pairs_of(
    a: Checkpoint, b: Checkpoint, names: Collection[str] | None = None
) -> Iterator[TensorPair]:
    """The tensors that both checkpoints hold in the same state, whatever their shapes."""
    keys: Iterable[Key] = dict.fromkeys([*a.tensors, *b.tensors])
    if names is not None:
        keys = [Key(n, s) for n in dict.fromkeys(names) for s in a.states(n) if s in b.states(n)]
    docs = [{Key(d.name, d.state): d for d in ck.manifest.tensors} for ck in (a, b)]
    for key in keys:
        x, y = (ck.tensors.get(Key(ck.aliases.get(key.name, key.name), key.state)) for ck in (a, b))
        if x is not None and y is not None:
            of_x, of_y = docs[0][x.key], docs[1][y.key]
            # digests cover dtype, shape and chunks, too
            same = of_x.digest is not None and of_x.digest == of_y.digest
            if of_x.fingerprint is not None and (x.dtype, x.shape) == (y.dtype, y.shape):
                same |= of_x.fingerprint == of_y.fingerprint
            yield TensorPair(key, x, y, (a, b), same, of_x.chunk or of_y.chunk)


def _boxes(shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...] | None) -> Iterator[Box]:
    """The tensor, cut along its first dims into boxes of at most `_BLOCK` bytes, where possible at chunk edges."""
    steps = list(shape)
    for d, n in enumerate(shape):
        inner = math.prod(shape[d + 1 :]) * itemsize
        if n * inner <= _BLOCK:
            break
        steps[d] = max(1, _BLOCK // inner)
        if chunk is not None and steps[d] > chunk[d]:
            steps[d] -= steps[d] % chunk[d]
    if not math.prod(shape):
        return
    for start in product(*(range(0, n, s) for n, s in zip(shape, steps, strict=True))):
        yield Box(start, tuple(min(s, n - i) for s, n, i in zip(steps, shape, start, strict=True)))


def _reader(info: TensorInfo, ck: Checkpoint) -> _Reader:
    """A function that reads a box of a tensor, row-major, into given memory."""
    extents = list(ck.source.extents(info.key))

    def read(box: Box, memory: NDArray[np.uint8]) -> NDArray[Any]:
        raw = memory[: box.size * info.itemsize]
        wanted = ReadItem(info, extents, [(0, Piece(box, 0, row_major(box.shape)))])
        read_items(ck.store, [wanted], [raw], [str(info.key)], ReadOptions(threads=1))
        return raw.view(numpy_dtype(info.dtype))

    return read


def _differences(
    pairs: Sequence[TensorPair], workers: int, progress: Progress | None
) -> Iterator[TensorDifference]:
    total, done, next_pair = sum(p.nbytes for p in pairs), 0, 0
    counts: dict[int, Counts] = {}
    remaining: dict[int, int] = {}  # boxes of a tensor that are not compared yet

    def tasks() -> Iterator[tuple[int, Box, list[_Reader]]]:
        for number, p in enumerate(pairs):
            boxes = p.boxes()
            counts[number], remaining[number] = Counts(), len(boxes)
            if boxes:
                readers = [
                    _reader(info, ck) for info, ck in zip((p.a, p.b), p.checkpoints, strict=True)
                ]
                for box in boxes:
                    yield number, box, readers

    own = threading.local()  # memory of each worker, the same for every box

    def work(task: tuple[int, Box, list[_Reader]]) -> Counts:
        arrays, (_, box, readers) = [], task
        for side, read in enumerate(readers):
            if not hasattr(own, f"side{side}"):
                setattr(own, f"side{side}", np.empty(max(_BLOCK, _LARGEST), np.uint8))
            arrays.append(read(box, getattr(own, f"side{side}")))
        return compare_values(arrays[0], arrays[1])

    for (number, box, _), part in run(work, tasks(), workers):
        counts[number] += part
        remaining[number] -= 1
        done += box.size * (pairs[number].a.itemsize + pairs[number].b.itemsize)
        if progress is not None:
            progress(done, total)
        # None, if the boxes of this tensor are not cut yet
        while remaining.get(next_pair) == 0:
            yield _difference(pairs[next_pair], counts.pop(next_pair))
            next_pair += 1
    for number in range(next_pair, len(pairs)):  # without a box
        yield _difference(pairs[number], counts[number])


def _difference(p: TensorPair, counts: Counts) -> TensorDifference:
    return TensorDifference(
        p.key.name,
        p.key.state,
        p.a.shape,
        (p.a.dtype, p.b.dtype),
        p.a.dtype == p.b.dtype and not counts.differing,
        counts.differing,
        counts.nan_mismatches,
        counts.max_abs,
        counts.max_rel,
        p.same_digest,
    )


_INPUT_ELEMENTS = 1 << 18  # elements of each contribution in memory at once


def spread_of(view: Viewed | None, keys: Iterable[Key]) -> dict[str, dict[str, Any]]:
    """Measure how far the inputs of means differ; reads each input once, in bounded memory.

    Args:
        view: the view that computes the means; None if there is none.

    Returns:
        For each of these tensors that is a mean, by name and state, the number of `values` and
        `max_abs_difference`, the largest difference of any two values of an element. For a tensor
        made of several means, or parts of them, it is the largest of these means as wholes.
    """
    out: dict[str, dict[str, Any]] = {}
    if view is None:
        return out
    differences: dict[int, float] = {}  # several tensors may be made of one mean
    for key in keys:
        files = {id(file): file for file in view.means(key)}
        for number, file in files.items():
            if number not in differences:
                differences[number] = _input_difference(view.store, file)
        if files:
            largest = float(np.max([differences[number] for number in files]))  # NaN where one is
            values = max(len(file.inputs) for file in files.values())
            measured = {"values": values, "max_abs_difference": to_json(largest)}
            out.setdefault(key.name, {})[key.state] = measured
    return out


def _input_difference(store: Store, file: ComputedFile) -> float:
    info, largest = file.formula.info, 0.0
    for first in range(0, info.size, _INPUT_ELEMENTS):
        last = min(first + _INPUT_ELEMENTS, info.size)
        least = most = None
        for view, extents in zip(file.formula.inputs, file.inputs, strict=True):
            values = read_flat(store, view.info, extents(None), first, last).astype(np.float64)
            least = values if least is None else np.minimum(least, values)
            most = values if most is None else np.maximum(most, values)
        if least is not None and most is not None:
            with np.errstate(invalid="ignore"):  # infinities
                apart = np.where(least == most, 0.0, most - least)
            largest = float(np.maximum(largest, apart.max()))
    return largest
