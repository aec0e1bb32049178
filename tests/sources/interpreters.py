"""The two interpreters of pickles, and whether they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ucformat.errors import UcformatError
from ucformat.reading.stand_ins import Inert, NdArray, NumpyDtype, Stream
from ucformat.sources.pickle import unpickler

try:
    from ucformat._native import interpret as compiled
except ImportError:
    compiled = unpickler.interpret_in_python

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INTERPRETERS", "NATIVE", "agree", "compiled", "needs_native"]

NATIVE = compiled is not unpickler.interpret_in_python
needs_native = pytest.mark.skipif(
    not NATIVE,
    reason="ucformat._native was not built (it needs x86-64 Linux and a C compiler): pip install -e .",
)
INTERPRETERS = [
    pytest.param(compiled, id="native", marks=needs_native),
    pytest.param(unpickler.interpret_in_python, id="python"),
]


def outcome(data: bytes, interpret: Callable[..., Any]) -> tuple[Any, str]:
    """The value of a pickle, and the error instead of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpickler, "interpret", interpret)
        try:
            return unpickler.unpickle(data, file="x.pt", storage_nbytes=lambda _: 16), ""
        except UcformatError as error:
            return None, f"{type(error).__name__}: {error}"


def agree(data: bytes) -> str:
    """Assert that both make the same of a pickle; the error that both raise."""
    (ours, error), (theirs, other) = (
        outcome(data, compiled),
        outcome(data, unpickler.interpret_in_python),
    )
    assert error == other, data
    assert _difference(ours, theirs) is None, data
    return error


def _parts(value: Any) -> list[Any] | None:
    """The values in a container, in order; None: it is none."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, Inert):
        return [value.name, value.args, value.state, value.items]
    if isinstance(value, NdArray):
        return [value.dtype, value.shape, value.data, value.fortran]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))  # of scalars, and of tuples of them
    if isinstance(value, Stream | NumpyDtype):
        return value.data if isinstance(value, Stream) else (value.code, value.order)
    return value if isinstance(value, int | str | bytes | bytearray) else repr(value)


def _difference(one: Any, other: Any) -> tuple[Any, Any] | None:
    """Two parts, one of each value, that differ in type or content, or in where else they are the same object."""
    twins: dict[int, Any] = {}
    left = [(one, other)]
    while left:
        a, b = left.pop()
        if type(a) is not type(b):
            return a, b
        parts, others = _parts(a), _parts(b)
        if parts is None or others is None:
            if _plain(a) != _plain(b):
                return a, b
        elif id(a) not in twins and id(b) not in twins:
            twins |= {id(a): b, id(b): a}
            if len(parts) != len(others):
                return a, b
            left += zip(parts, others, strict=True)
        elif twins.get(id(a)) is not b or twins.get(id(b)) is not a:
            return a, b
    return None
