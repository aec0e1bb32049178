"""Non-tensor values of a training state: as JSON in the checkpoint, and back in the types that a program has."""

from __future__ import annotations

import base64
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ucformat.errors import Refused
from ucformat.sources.stand_ins import Dtype, NdArray, Opaque
from ucformat.sources.values import from_json, to_json
from ucformat.torch.memory import dtype_name, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PerRank", "decode", "encode", "like"]


class PerRank:
    """A value of a training state that each rank has for itself: a random generator's state, a data loader's.

    `value` is a plain value, or an object with `state_dict` and `load_state_dict`. All ranks' are kept. Where as many
    ranks load as saved, each gets its own back. Where they are more or fewer, `merge(values, rank, ranks)` makes of all
    saved values the one for a rank; without `merge` that is an error, for nothing is dropped silently.
    """

    def __init__(self, value: Any, merge: Callable[[list[Any], int, int], Any] | None = None) -> None:
        self.value, self.merge = value, merge


def encode(value: Any, path: str = "") -> Any:
    """The JSON form of a value; what has none is kept as an opaque pickle, which only `trust=True` opens again."""
    return to_json(_stand_in(value), path=path)


def _stand_in(value: Any) -> Any:
    """The value with stand-ins for what `to_json` does not know."""
    if value is None or isinstance(value, bool | int | float | str | bytes | bytearray | complex | slice):
        return value
    if isinstance(value, dict) and all(isinstance(k, str | int | float | tuple | bytes | None) for k in value):
        return {k: _stand_in(v) for k, v in value.items()}
    if type(value) in (list, tuple, torch.Size):
        return [_stand_in(v) for v in value]
    if type(value) in (set, frozenset):
        return {_stand_in(v) for v in value}
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        dense = value.detach().cpu().contiguous()
        return NdArray(dtype_name(dense.dtype), tuple(dense.shape), host_memory(dense).tobytes())
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return NdArray(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    try:
        return Opaque(pickle.dumps(value))
    except Exception as error:
        raise Refused(
            f"a {type(value).__name__} has no JSON form and cannot be pickled: {error}",
            hint="save what its `state_dict()` gives, or leave it out",
        ) from error


def decode(data: Any, template: Any = None, *, trust: bool = False) -> Any:
    """The value that a JSON form stands for, in the types of `template` where that has the same structure.

    Raises:
        Refused: part of it is an opaque pickle, and `trust` is false.
    """
    return like(_opened(from_json(data), trust), template)


def _opened(value: Any, trust: bool) -> Any:  # noqa: FBT001
    if isinstance(value, list):
        return [_opened(v, trust) for v in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$opaque"}:
        if not trust:
            raise Refused(
                "the value is a pickle, which could run code when it is opened",
                hint="trust=True opens it, if you trust whoever wrote the checkpoint",
            )
        return pickle.loads(base64.b64decode(value["$opaque"]))  # noqa: S301 - asked for by `trust`
    return {k: _opened(v, trust) for k, v in value.items()}


def like(value: Any, template: Any) -> Any:
    """The value with tuples, tensors, dtypes and kinds of mappings where the template has them."""
    if isinstance(template, dict) and isinstance(value, dict):
        return {k: like(v, template.get(k)) for k, v in value.items()}
    if isinstance(template, tuple) and isinstance(value, list):
        padded = [*template, *[template[-1] if template else None] * len(value)]
        items = (like(v, t) for v, t in zip(value, padded, strict=False))
        return type(template)(*items) if hasattr(template, "_fields") else tuple(items)
    if isinstance(template, list) and isinstance(value, list):
        padded = [*template, *[template[-1] if template else None] * len(value)]
        return [like(v, t) for v, t in zip(value, padded, strict=False)]
    if isinstance(template, torch.dtype) and isinstance(value, str):
        return getattr(torch, value)
    if isinstance(value, np.ndarray) and not isinstance(template, np.ndarray):
        return _tensor(value)
    return value


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor with an array's elements; NumPy's bfloat16 and float8 are torch's."""
    name = array.dtype.name
    out = torch.empty(array.shape, dtype=getattr(torch, name))
    host_memory(out)[...] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return out
