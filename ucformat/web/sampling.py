"""Samples of tensors: boxes that are spread over them, read within a limit, and statistics of their elements."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.geometry.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.lazy import Tensor

_SAMPLE = 1 << 20  # bytes of a sample
#: Bytes that may be read for a sample.
MOST_READ = 64 << 20
_BLOCKS = 16  # places from which a sample is taken
_BINS = 24


class Budget:
    """Bytes that may be read for samples; what a read that fails was to read counts, too."""

    def __init__(self, most: int) -> None:
        self._most, self.spent = most, 0

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes may be read; then they are spent."""
        is_enough = self.spent + nbytes <= self._most
        self.spent += nbytes if is_enough else 0
        return is_enough


@dataclass(frozen=True)
class Sample:
    """Some elements of a tensor.

    Attributes:
        values: the elements, flat, in the order of `boxes`.
        boxes: where they are.
        bytes_read: what was read for them: chunks that are compressed or checked are read whole.
    """

    values: NDArray[Any]
    boxes: tuple[Box, ...]
    bytes_read: int


def read_sample(tensor: Tensor, boxes: Iterable[Box], budget: Budget | None = None) -> Sample:
    """Read boxes of a tensor, without those for which more bytes would have to be read than may be."""
    budget = Budget(MOST_READ) if budget is None else budget
    parts: list[NDArray[Any]] = []
    taken: list[Box] = []
    bytes_read = 0
    for box in boxes:
        nbytes = tensor.plan(box).bytes_read
        if not budget.take(nbytes):
            continue
        bytes_read += nbytes
        parts.append(np.asarray(tensor.read_box(box, None)).reshape(-1))
        taken.append(box)
    values = np.concatenate(parts) if parts else np.empty(0, tensor.dtype)
    return Sample(values, tuple(taken), bytes_read)


def numbers_of(values: NDArray[Any], dtype: str) -> NDArray[np.float64] | None:
    """Elements as numbers; None of dtypes that are none, or of which only the bits are known."""
    if not (dtype == "bool" or re.match(r"u?int|b?float", dtype)):
        return None
    try:
        return values.astype("f8")
    except (TypeError, ValueError):
        return None


def sample(tensor: Tensor) -> dict[str, Any]:
    """Statistics of at most 1 MiB of elements, how many they are, and how much was read for them."""
    drawn = read_sample(tensor, sampled_boxes(tensor.info))
    values = drawn.values
    numbers = numbers_of(values, tensor.info.dtype) if values.size else None
    return {
        "elements": int(values.size),
        "bytes": int(values.size) * tensor.info.itemsize,
        "bytes_read": drawn.bytes_read,
        "of": tensor.info.size,
        "boxes": [str(box) for box in drawn.boxes],
        "numbers": None if numbers is None else _statistics(numbers),
    }


def _statistics(numbers: np.ndarray[Any, Any]) -> dict[str, Any]:
    finite = numbers[np.isfinite(numbers)]
    statistics: dict[str, Any] = {
        "nan": int(np.isnan(numbers).sum()),
        "infinite": int(np.isinf(numbers).sum()),
        "zero": int((numbers == 0).sum()),
    }
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        # by a power of two, so that neither sums nor squares overflow, or become zero
        exponent = math.frexp(max(-low, high))[1]
        scaled = np.ldexp(finite, -exponent)
        most = float(np.abs(scaled).max())  # which rounding must not exceed
        parts = {
            "mean": min(max(float(scaled.mean()), -most), most),
            "deviation": min(float(scaled.std()), most),
            "rms": min(float(np.sqrt(np.mean(scaled**2))), most),
        }
        statistics |= {"minimum": low, "maximum": high}
        statistics |= {name: math.ldexp(part, exponent) for name, part in parts.items()}
        places = scaled - scaled.min()
        counts, _ = np.histogram(places / (places.max() or 1.0), bins=_BINS, range=(0.0, 1.0))
        statistics["histogram"] = counts.tolist()
    return statistics


def sampled_boxes(info: TensorInfo, most: int = _SAMPLE, blocks: int = _BLOCKS) -> Iterator[Box]:
    """Boxes of at most `most` bytes together, spread over a tensor; all of a small one."""
    if not info.size:
        return
    if info.nbytes <= most:
        yield Box.whole(info.shape)
        return
    # a box is one index of the first dims, and some of the next
    limit = most // blocks // info.itemsize
    inner, dim = 1, len(info.shape)
    while dim and inner * info.shape[dim - 1] <= limit:
        dim -= 1
        inner *= info.shape[dim]
    count = max(1, min(info.shape[dim - 1], limit // inner))  # of the dim before
    lead = info.shape[: dim - 1]
    places = math.prod(lead) * -(-info.shape[dim - 1] // count)
    for k in range(min(blocks, places)):
        *at, step = np.unravel_index(
            k * places // min(blocks, places), (*lead, -(-info.shape[dim - 1] // count))
        )
        start = min(int(step) * count, info.shape[dim - 1] - count)
        yield Box(
            (*(int(i) for i in at), start, *(0,) * (len(info.shape) - dim)),
            (*(1,) * len(lead), count, *info.shape[dim:]),
        )
