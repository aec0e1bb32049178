"""What combining must compute, on whole tensors: the formulas once more, as their papers and NumPy write them."""

from __future__ import annotations

import hashlib
import math
import os
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

import ucformat
from tests.fakes import FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Tensors = "Mapping[str, Any]"


def source(tensors: Mapping[Any, Any], **facts: Any) -> Checkpoint:
    """A checkpoint in memory, of tensors by name, or by name and state."""
    arrays = {key if isinstance(key, tuple) else (key, "weight"): a for key, a in tensors.items()}
    return Checkpoint(
        FakeSource.write(MemoryStore(f"combined-{uuid.uuid4().hex}"), arrays, **facts)
    )


def saved(place: Path | str, tensors: Mapping[Any, Any], **facts: Any) -> Path:
    """The same as a universal checkpoint at a place."""
    ucformat.convert(source(tensors, **facts), os.fspath(place), chunk_bytes=512, shard_bytes=4096)
    return place  # type: ignore[return-value]


def rounded(wide: Any, dtype: str) -> Any:
    """A float64 result in a dtype."""
    return wide.astype(numpy_dtype(dtype))


def average(xs: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """The reference of an average."""
    return np.average(np.stack(xs), axis=0, weights=weights) if xs[0].size else xs[0]


def moving_average(xs: Sequence[Any], decay: float) -> Any:
    """The recursion of an exponential moving average."""
    e = xs[0]
    for x in xs[1:]:
        e = decay * e + (1 - decay) * x
    return e


def task_arithmetic(base: Any, xs: Sequence[Any], weights: Sequence[float], scale: float) -> Any:
    """The reference of task arithmetic."""
    total = np.zeros_like(base)
    for w, x in zip(weights, xs, strict=True):
        total = total + w * (x - base)
    return base + scale * total


def slerp(a: Any, b: Any, t: float) -> Any:
    """The reference of slerp, of flattened tensors."""
    u, v = a.ravel(), b.ravel()
    norms = math.sqrt(math.fsum(u * u)), math.sqrt(math.fsum(v * v))
    cosine = math.fsum(u * v) / norms[0] / norms[1] if min(norms) > 0 else 1.0
    if abs(cosine) > 0.9995:
        return (1 - t) * a + t * b
    angle = math.acos(cosine)
    return (
        math.sin((1 - t) * angle) / math.sin(angle) * a + math.sin(t * angle) / math.sin(angle) * b
    )


def ties(
    base: Any, xs: Sequence[Any], weights: Sequence[float], density: float, scale: float
) -> Any:
    """The reference of TIES: trim by sorting, elect, disjoint mean."""
    trimmed = []
    for x in xs:
        delta = x - base
        if delta.size and density < 1:
            keep = max(1, int(density * delta.size))
            least = np.sort(np.abs(delta).ravel())[-keep]
            delta = np.where(np.abs(delta) >= least, delta, 0)
        trimmed.append(delta)
    total = np.zeros_like(base)
    for w, delta in zip(weights, trimmed, strict=True):
        total = total + w * delta
    sign = np.where(total >= 0, 1, -1)
    above, below = np.zeros_like(base), np.zeros_like(base)
    for w, delta in zip(weights, trimmed, strict=True):
        agrees = np.sign(delta) == sign
        above = above + np.where(agrees, w * delta, 0)
        below = below + np.where(agrees, w, 0)
    return base + scale * np.where(below > 0, above / np.where(below > 0, below, 1), 0)


def splitmix64(key: int, index: int) -> int:
    """Output number `index` of SplitMix64, as it is published, with Python's integers."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def kept(seed: int, name: str, number: int, shape: Sequence[int], density: float) -> Any:
    """The mask of DARE of a whole tensor."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{number}/{name}".encode()).digest()[:8], "little")
    uniform = [(splitmix64(key, i) >> 11) / 2**53 for i in range(math.prod(shape))]
    return (np.array(uniform) < density).reshape(shape)


def dare(
    base: Any,
    xs: Sequence[Any],
    weights: Sequence[float],
    density: float,
    scale: float,
    seed: int,
    name: str,
) -> Any:
    """The reference of DARE."""
    total = np.zeros_like(base)
    for n, (w, x) in enumerate(zip(weights, xs, strict=True)):
        total = total + w * ((x - base) * kept(seed, name, n, base.shape, density) / density)
    return base + scale * total
