"""How far the contributions to a mean lie apart: what a checkpoint that keeps only the mean can no longer say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.reading.read import read_flat
from ucformat.sources.values import to_json
from ucformat.views.viewed import Viewed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.geometry.tensor import Key
    from ucformat.reading.readable import Readable
    from ucformat.storage.base import Store
    from ucformat.views.viewed import ComputedFile

__all__ = ["spread_of"]

_ELEMENTS = 1 << 18  # of each contribution, held at once


def spread_of(source: Readable, keys: Iterable[Key]) -> dict[str, dict[str, Any]]:
    """For each of these tensors that is a mean, by name and state: of how many values, and how far they lie apart.

    `max_abs_difference` is the largest that any element has between two of the values. Of a tensor made of several
    means, or of parts of them, it is the largest of these as wholes. Reads each contribution once, in bounded memory.
    """
    out: dict[str, dict[str, Any]] = {}
    if not isinstance(source, Viewed):
        return out
    known: dict[int, float] = {}  # several tensors may be made of one mean
    for key in keys:
        files = {id(file): file for file in source.means(key)}
        for number, file in files.items():
            if number not in known:
                known[number] = _difference(source.store, file)
        if files:
            largest = float(np.max([known[number] for number in files]))  # NaN where one is
            values = max(len(file.inputs) for file in files.values())
            found = {"values": values, "max_abs_difference": to_json(largest)}
            out.setdefault(key.name, {})[key.state] = found
    return out


def _difference(store: Store, file: ComputedFile) -> float:
    info, largest = file.formula.info, 0.0
    for first in range(0, info.size, _ELEMENTS):
        last = min(first + _ELEMENTS, info.size)
        least = most = None
        for view, extents in zip(file.formula.inputs, file.inputs, strict=True):
            values = read_flat(store, view.info, extents(), first, last).astype(np.float64)
            least = values if least is None else np.minimum(least, values)
            most = values if most is None else np.maximum(most, values)
        if least is not None and most is not None:
            with np.errstate(invalid="ignore"):  # infinities
                apart = np.where(least == most, 0.0, most - least)
            largest = float(np.maximum(largest, apart.max()))
    return largest
