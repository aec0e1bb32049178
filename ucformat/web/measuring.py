"""How far tensors of two checkpoints are apart, and their norms along a run: by samples, within limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import UcformatError
from ucformat.jobs.compare import compare_values, pairs_of
from ucformat.web.sampling import MOST_READ, Budget, numbers_of, read_sample, sampled_boxes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key
    from ucformat.jobs.compare import TensorPair
    from ucformat.web.library import Access, Library

    Explain = Callable[[UcformatError], str]

_TENSORS = 128  # whose distance is measured
_PART = 64 << 10  # bytes of a sample of each
_PARTS = 4  # places from which it is taken
_CHECKPOINTS = 16  # along a run
_STEPS = 500  # the newest, among which they are
_POINT = 256 << 10  # bytes of a sample of each
_WEIGHTS = ("weight", "master")


def distances(a: Checkpoint, b: Checkpoint, explain: Explain) -> dict[str, Any]:
    """How far tensors of equal shape are apart, the farthest first.

    Those of equal digests are not read. Of the others some are, weights and large ones first.

    Args:
        explain: what a client is told of an error.
    """
    pairs = [pair for pair in pairs_of(a, b) if pair.a.shape == pair.b.shape]
    unequal = [pair for pair in pairs if not pair.same_digest]
    unequal.sort(key=lambda pair: (pair.key.state not in _WEIGHTS, -pair.nbytes))
    data: dict[str, Any] = {
        "bytes_read": 0,
        "sample": _PART,
        "by_digest": len(pairs) - len(unequal),
        "unmeasured": max(0, len(unequal) - _TENSORS),
        "failed": [],
        "tensors": [],
    }
    budget = Budget(MOST_READ)
    for pair in unequal[:_TENSORS]:
        try:
            measured = _measured(pair, budget)
        except UcformatError as error:
            data["failed"].append(
                {"name": pair.key.name, "state": pair.key.state, "reason": explain(error)}
            )
            continue
        if measured["elements"] or not pair.a.size:
            data["tensors"].append(measured)
        else:  # of which even a part would exceed the limit
            data["unmeasured"] += 1
    data["bytes_read"] = budget.spent
    data["tensors"].sort(key=lambda t: -math.inf if t["distance"] is None else -t["distance"])
    return data


def _measured(pair: TensorPair, budget: Budget) -> dict[str, Any]:
    """The distance of one tensor, by a sample of the same boxes on both sides."""
    wider = max(pair.a, pair.b, key=lambda info: info.itemsize)
    x, y = (
        ck[info.name, info.state]
        for ck, info in zip(pair.checkpoints, (pair.a, pair.b), strict=True)
    )
    boxes = [
        box
        for box in sampled_boxes(wider, _PART, _PARTS)
        if budget.take(x.plan(box).bytes_read + y.plan(box).bytes_read)
    ]
    samples = [read_sample(tensor, boxes) for tensor in (x, y)]
    counts = compare_values(samples[0].values, samples[1].values)
    left, right = (numbers_of(s.values, t.info.dtype) for s, t in zip(samples, (x, y), strict=True))
    are_numbers = left is not None and right is not None
    return {
        "name": pair.key.name,
        "state": pair.key.state,
        "shape": list(pair.a.shape),
        "dtypes": [pair.a.dtype, pair.b.dtype],
        "elements": int(samples[0].values.size),
        "of": pair.a.size,
        "bytes_read": sum(s.bytes_read for s in samples),
        "differing": counts.differing,
        "nan_mismatches": counts.nan_mismatches,
        "max_abs": counts.max_abs if are_numbers else None,
        "distance": None if left is None or right is None else _distance(left, right),
    }


def _distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """The norm of the difference over that of `a`; infinite where only one is finite, so that it comes first."""
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not (finite | same).all():
        return math.inf
    a, b = a[finite], b[finite]
    scale = _exponent(np.concatenate((a, b)))
    a, b = np.ldexp(a, -scale), np.ldexp(b, -scale)
    apart, size = _norm_of(b - a), _norm_of(a)
    return apart / size if size else math.inf if apart else 0.0


def _exponent(values: NDArray[np.float64]) -> int:
    """The power of two by which the largest magnitude exceeds one: scaling by it changes no digit."""
    return math.frexp(float(np.abs(values).max(initial=0.0)))[1]


def _norm_of(values: NDArray[np.float64]) -> float:
    """The Euclidean norm, although squares of values may be beyond what float64 has."""
    if not np.isfinite(values).all():
        return float(np.linalg.norm(values))
    scale = _exponent(values)
    with np.errstate(over="ignore"):
        return float(np.ldexp(np.linalg.norm(np.ldexp(values, -scale)), scale))


def norms_along_run(library: Library, access: Access, entry: Entry, key: Key) -> dict[str, Any]:
    """The norms of a tensor at steps that are spread over the newest of a run."""
    run = f"run = {quoted(str(entry.run))} and step is not null"
    entries = library.entries(access, run, limit=_STEPS)
    entries.sort(key=lambda e: (e.step or 0, e.created))
    last = len(entries) - 1
    chosen = {round(n * last / (_CHECKPOINTS - 1)) for n in range(_CHECKPOINTS)} if entries else ()
    data: dict[str, Any] = {
        "checkpoints": len(entries),
        "sample": _POINT,
        "bytes_read": 0,
        "points": [],
        "failed": [],
    }
    budget = Budget(MOST_READ)
    by_fingerprint: dict[tuple[Any, ...], dict[str, Any]] = {}
    for at in sorted(chosen):
        each = entries[at]
        about = {"id": each.id, "name": each.name, "step": each.step}
        try:
            ck = library.reference(each.id, access).checkpoint
            tensor = ck[key.name, key.state]
            same = (tensor.recorded_fingerprint, tensor.info.dtype, tensor.shape)
            values = by_fingerprint.get(same) if same[0] is not None else None
            if values is None:
                boxes = sampled_boxes(tensor.info, _POINT)
                drawn = read_sample(tensor, boxes, budget)
                values = _norm(numbers_of(drawn.values, tensor.info.dtype), tensor.size)
                if same[0] is not None:
                    by_fingerprint[same] = values
        except UcformatError as error:
            reason = library.shown_error(error, access)["message"]
            data["failed"].append(about | {"reason": reason})
        else:
            data["points"].append(about | values)
    data["bytes_read"] = budget.spent
    return data


def _norm(numbers: NDArray[np.float64] | None, size: int) -> dict[str, Any]:
    """The norm of a tensor as its sample tells it; None of dtypes that are no numbers, and without a sample."""
    if numbers is None or not (numbers.size or not size):
        return {"norm": None, "elements": 0, "of": size}
    norm = _norm_of(numbers) * math.sqrt(size / numbers.size) if size else 0.0
    return {"norm": norm, "elements": int(numbers.size), "of": size}
