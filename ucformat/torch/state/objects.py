"""Non-tensor values of a training state: their JSON form, per-rank values, and the states of random generators."""

from __future__ import annotations

import copy
import enum
import hashlib
import io
import json
import logging
import pickle
import random
import sys
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ucformat.errors import IntegrityError, UnsafeError, UnsupportedError, UsageError
from ucformat.reading.dtypes import dtype_name as numpy_dtype_name
from ucformat.reading.stand_ins import (
    Dtype,
    Inert,
    NamedFields,
    NdArray,
    NumpyDtype,
    NumpyScalar,
    OfClass,
    Opaque,
    Size,
    SmallTensor,
    Stream,
)
from ucformat.reading.values import array_dtype_text, from_json, numpy_dtype, to_json
from ucformat.schema import ITEMSIZE
from ucformat.torch.state.elements import host_memory
from ucformat.torch.state.memory import dtype_name, torch_dtype
from ucformat.torch.state.sharded import is_dtensor
from ucformat.torch.state.subclasses import class_name, plain_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_log = logging.getLogger("ucformat")

__all__ = ["PerRank", "Rng", "StateParts", "decode", "encode", "like", "tensor_of", "unfit"]


class PerRank:
    """A value of a training state that differs between ranks, such as the state of a data loader.

    The values of all ranks are saved. If the same number of ranks loads, each gets its own value
    back; otherwise `merge` computes it, and without `merge` the load fails, since nothing is
    dropped silently.

    Args:
        value: a plain value, or an object with `state_dict` and `load_state_dict`.
        merge: `merge(values, rank, ranks)` returns the value of a rank, given all saved values in
            order and the number of ranks that load.
    """

    call = "PerRank(value, merge"  #: the beginning of the call that takes `merge`, for errors

    def __init__(
        self, value: Any, merge: Callable[[list[Any], int, int], Any] | None = None
    ) -> None:
        self.value, self.merge = value, merge


class StateParts:
    """The modules that make up a model, or their optimizers, as one entry of a training state.

    The entry is the same however a model is cut, so another program may load it into other parts,
    or into the whole model.

    Args:
        parts: modules that name their parameters as the whole model does, such as the pipeline
            stages of this rank; or an optimizer for each. One optimizer of all parts needs none of
            this.
    """

    def __init__(self, parts: Sequence[torch.nn.Module] | Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)


def encode(value: Any, path: str = "") -> Any:
    """Return the JSON form of a value; a part without one becomes an opaque pickle, which only `trust=True` loads."""
    try:
        return to_json(_stand_in(value), path=path, exact=True)
    except UsageError as error:
        raise UsageError(f"{path or 'a value'} contains {error.message}", hint=error.hint) from None
    except RecursionError:
        raise UnsupportedError(
            f"{path or 'a value'} contains itself, or is nested too deeply",
            hint="save its `state_dict()`, or leave it out",
        ) from None


def _stand_in(value: Any) -> Any:
    """The value with stand-ins for types that `to_json` does not support."""
    if isinstance(value, np.generic):
        return _numpy_scalar(value)
    if value is None or type(value) in (
        bool,
        int,
        float,
        str,
        bytes,
        bytearray,
        complex,
        slice,
        Opaque,
    ):
        return value
    if isinstance(value, enum.Enum):
        return OfClass(class_name(type(value)), _stand_in(value.value))
    if type(value) is dict and all(map(_is_key, value)):
        return {k if _is_plain(k) else _stand_in(k): _stand_in(v) for k, v in value.items()}
    if type(value) is list:
        return [_stand_in(v) for v in value]
    if type(value) is torch.Size:
        return Size(value)
    if isinstance(value, tuple) and (type(value) is tuple or _is_named(type(value))):
        items = tuple(_stand_in(v) for v in value)
        return (
            items
            if type(value) is tuple
            else NamedFields(class_name(type(value)), value._fields, items)  # type: ignore[attr-defined]
        )
    if type(value) in (set, frozenset) and all(_is_plain(v) for v in value):
        return value
    base = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
    if base is None or type(value) is base or _has_more(value):
        return _object(value)
    plain = _stand_in(_PLAIN[base](value))
    return plain if isinstance(plain, Opaque) else OfClass(class_name(type(value)), plain)


#: What makes a plain value of one of a derived class, whatever methods that has.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: memoryview(value).tobytes(),
    bytearray: lambda value: bytearray(memoryview(value)),
    **{kind: kind for kind in (dict, list, tuple, set, frozenset)},
}


def _has_more(value: Any) -> bool:
    """Whether a value of a derived class has attributes besides what it is derived from."""
    # which PyTorch gives to a module's state dict
    attributes = getattr(value, "__dict__", {}).keys() - {"_metadata"}
    return bool(attributes) or any(getattr(kind, "__slots__", ()) for kind in type(value).__mro__)


def _is_key(key: Any) -> bool:
    """Whether the key of a dictionary has a JSON form that stays a key."""
    if isinstance(key, enum.Enum):
        return _is_plain(key.value)
    if isinstance(key, int | float | str | bytes | np.generic):
        return not isinstance(_stand_in(key), Opaque)
    return _is_plain(key)


def _object(value: Any) -> Any:
    """The stand-in of an object of PyTorch or NumPy; a pickle of any other."""
    if isinstance(value, torch.Tensor):
        dense = plain_values("a tensor that", value).cpu().contiguous()
        return SmallTensor(
            dtype_name(dense.dtype), tuple(dense.shape), host_memory(dense).tobytes()
        )
    if type(value) is io.BytesIO:
        return Stream(value.getvalue())
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, torch.device):
        return Inert("torch.device", (str(value),))
    if isinstance(value, torch.layout):
        return Inert("torch.serialization._get_layout", (str(value),))
    if isinstance(value, np.dtype) and _is_stored(value):
        return NumpyDtype(array_dtype_text(value))
    if type(value) is np.ndarray and _is_stored(value.dtype):
        return NdArray(array_dtype_text(value.dtype), value.shape, value.tobytes())
    return _opaque(value)


def _numpy_scalar(value: np.generic) -> Any:
    """A NumPy scalar with its type, if Python has its value."""
    if value.dtype.name in ITEMSIZE:
        module = "ml_dtypes" if value.dtype.isbuiltin != 1 else "numpy"
        return NumpyScalar(f"{module}.{value.dtype.name}", value.item())
    if type(value) in (np.str_, np.bytes_):
        return NumpyScalar(f"numpy.{type(value).__name__}", value.item())
    return _opaque(value)


def _is_stored(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a NumPy dtype have a JSON form: of numbers or text."""
    return dtype.name in ITEMSIZE or (dtype.kind in "biufcSU" and dtype.itemsize > 0)


def _is_named(kind: type) -> bool:
    """Whether a class is that of a named tuple."""
    fields = getattr(kind, "_fields", None)
    return isinstance(fields, tuple) and all(isinstance(f, str) for f in fields)


def _opaque(value: Any) -> Opaque:
    try:
        return Opaque(pickle.dumps(value))
    except Exception as error:
        raise UnsupportedError(
            f"a {type(value).__name__} has no JSON form and cannot be pickled: {error}",
            hint="save its `state_dict()`, or leave it out",
        ) from error


def _is_plain(value: Any) -> bool:
    """Whether an element of a set is its own stand-in."""
    if isinstance(value, tuple | frozenset):
        return type(value) in (tuple, frozenset) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes, complex)


def decode(
    data: Any, template: Any = None, *, trust: bool = False, lost: list[str] | None = None
) -> Any:
    """Return the value that a JSON form encodes.

    Args:
        lost: gets the class of each part that is a plain value instead, because the program does
            not have it there (None: they are logged).
    """
    plain: list[str] = []
    value = like(
        from_json(data, _MAKERS | {"$opaque": _trusted if trust else _distrusted}), template, plain
    )
    if lost is not None:
        lost += plain
    elif plain:
        _log.warning("values are loaded without their classes: %s", "; ".join(dict.fromkeys(plain)))
    return value


def _distrusted(_: bytes) -> Any:
    raise UnsafeError(
        "the value is a pickle, which could run code when it is loaded; trust=True loads it",
        hint="pass trust=True if you trust the author of the checkpoint",
    )


def _named(name: str, fields: tuple[str, ...], *items: Any) -> Any:
    """The named tuple of a class that the program has imported and whose fields are the same."""
    for kind in _imported(name):
        if (
            isinstance(kind, type)
            and issubclass(kind, tuple)
            and getattr(kind, "_fields", None) == fields
        ):
            return tuple.__new__(kind, items)
    return OfClass(name, items)


def _imported(name: str) -> Iterator[Any]:
    """What the modules that the program has imported have under a name."""
    for module in (name[:i] for i, c in enumerate(name) if c == "."):
        value: Any = sys.modules.get(module)
        for part in name[len(module) + 1 :].split("."):
            value = vars(value).get(part) if hasattr(value, "__dict__") else None
        yield value


def _trusted(data: bytes) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301 - requested by `trust`
    except Exception as error:
        raise UnsupportedError(
            f"the value is a pickle that cannot be loaded: {type(error).__name__}: {error}",
            hint="make the classes importable that the saving program had",
        ) from error


def like(value: Any, template: Any, lost: list[str]) -> Any:
    """Return a value with the classes, named tuples, dtypes, NumPy arrays and scalars, and mapping types of a template.

    Args:
        template: of the same structure; where it is not, types stay.
    """
    if isinstance(value, OfClass):
        return _of_class(value, template, lost)
    if isinstance(value, dict):
        return _mapping_like(value, template if isinstance(template, dict) else {}, lost)
    if isinstance(value, list | tuple):
        return _sequence_like(value, template if isinstance(template, list | tuple) else [], lost)
    if isinstance(value, np.ndarray):
        return (
            tensor_of(value)
            if isinstance(template, torch.Tensor) and value.dtype.name in ITEMSIZE
            else value
        )
    if type(value) is torch.Tensor and isinstance(template, np.ndarray):
        return _array_like(array_of(value), template)
    if isinstance(template, torch.dtype) and isinstance(value, str):
        return _torch_dtype(value)
    if isinstance(value, set) and isinstance(template, frozenset):
        return frozenset(value)
    if isinstance(value, bytes) and isinstance(template, bytearray):
        return bytearray(value)
    if isinstance(template, np.generic) and type(value) in (bool, int, float):
        return _number_like(value, template)
    return value


def _number_like(value: float, template: np.generic) -> Any:
    """The number in the template's type, if that has it."""
    try:
        with np.errstate(over="ignore"):
            converted = template.dtype.type(value)
    except (OverflowError, TypeError, ValueError):
        return value
    return converted if converted.item() == value or value != value else value  # or not a number


#: Classes of Python itself, of which a plain value is all.
_KNOWN: dict[str, Callable[[Any], Any]] = {
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
}


def _of_class(stored: OfClass, template: Any, lost: list[str]) -> Any:
    """The value in the class that it had, if the template has it, or it is an enumeration that the program imported."""
    is_same = class_name(type(template)) == stored.name
    value = like(
        stored.value, template.value if isinstance(template, enum.Enum) else template, lost
    )
    if is_same and type(value) is type(template):  # a mapping, or a named tuple
        return value
    kinds: list[Any] = (
        [type(template)]
        if is_same
        else [k for k in _imported(stored.name) if isinstance(k, enum.EnumType)]
    )
    for kind in kinds:
        if issubclass(kind, enum.Enum):
            with suppress(KeyError, TypeError, ValueError):
                return kind(value)
        elif isinstance(template, list | set | bytearray):
            out = copy.copy(template)
            out.clear()
            (out.update if isinstance(out, set) else out.extend)(value)
            return out
        elif issubclass(kind, type(value)):
            return type(value).__new__(kind, value)
    if stored.name in _KNOWN and isinstance(value, dict):
        return _KNOWN[stored.name](value)
    if not (hasattr(type(value), "_fields") and type(value) is type(template)):
        lost.append(
            f"{stored.name}, which is not that of the program's value; it is a "
            f"{type(value).__name__}"
        )
    return value


def _torch_dtype(name: str) -> Any:
    """The dtype of a name; the name, if this version of PyTorch does not have it."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else name


def _device(*args: Any) -> torch.device:
    try:
        return torch.device(*args)
    except (RuntimeError, TypeError) as error:
        raise IntegrityError(f"the checkpoint has an invalid device: {error}") from error


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise IntegrityError(f"the checkpoint has an unknown layout: {name!r}")
    return layout


def _mapping_like(
    value: dict[Any, Any], template: dict[Any, Any], lost: list[str]
) -> dict[Any, Any]:
    kinds = {class_name(type(k)): k for k in template}
    items: dict[Any, Any] = {}
    for key, inner in value.items():
        new_key = like(key, kinds.get(key.name), lost) if isinstance(key, OfClass) else key
        items[new_key] = like(inner, template.get(new_key), lost)
    if type(template) is dict:
        return items
    out = copy.copy(template)  # an OrderedDict, a defaultdict with its factory
    out.clear()
    out.update(items)
    return out


def _sequence_like(
    value: list[Any] | tuple[Any, ...], template: list[Any] | tuple[Any, ...], lost: list[str]
) -> list[Any] | tuple[Any, ...]:
    """Elements beyond the template's length are like its last one."""
    padded = [*template, *[template[-1] if template else None] * len(value)]
    items = [like(v, t, lost) for v, t in zip(value, padded, strict=False)]
    if isinstance(template, list) and isinstance(value, list):
        return items
    if type(value) not in (list, tuple):  # stored with its type
        return value if isinstance(value, torch.Size) else tuple.__new__(type(value), items)  # type: ignore[type-var]
    if hasattr(template, "_fields") and len(items) == len(template):
        return type(template)(*items)
    return torch.Size(items) if isinstance(template, torch.Size) else tuple(items)


def _array_like(value: np.ndarray, template: np.ndarray) -> np.ndarray:
    """The array, writable, and in the template's byte order."""
    same = value.dtype == template.dtype.newbyteorder("<")
    return value.astype(template.dtype if same else value.dtype)


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with a copy of an array's elements."""
    out = torch.empty(array.shape, dtype=torch_dtype(numpy_dtype_name(array.dtype)))
    host_memory(out)[...] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return out


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return an array with a copy of a tensor's elements."""
    data = np.frombuffer(host_memory(tensor).tobytes(), numpy_dtype(dtype_name(tensor.dtype)))
    return data.reshape(tuple(tensor.shape))


#: Makes the values of PyTorch's types, and of the program's.
_MAKERS: dict[str, Callable[..., Any]] = {
    "$tensor": tensor_of,
    "$dtype": _torch_dtype,
    "$fields": _named,
    "$value": OfClass,
    "torch.Size": torch.Size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}


def unfit(value: Any, current: Any, *, cast: bool) -> tuple[list[str], list[str]]:
    """Check whether a value can replace a value of the program that may be a tensor.

    Returns:
        problems of type or shape, and problems of dtype.
    """
    if not isinstance(current, torch.Tensor):
        return [], []
    if is_dtensor(current) or not isinstance(value, torch.Tensor):
        return [f"a {type(value).__name__} cannot replace a {type(current).__name__}"], []
    if value.shape != current.shape:
        return [f"it is {list(current.shape)}, in the checkpoint {list(value.shape)}"], []
    if value.dtype != current.dtype and not cast:
        return [], [f"{current.dtype}, in the checkpoint {value.dtype}"]
    return [], []


_CUDA_STATE_BYTES = 16  # a seed and an offset, of 8 bytes each


class Rng:
    """The random generators of this rank, as an entry of a training state: Python's, NumPy's, torch's, and of devices.

    Each rank saves and restores its own. If the number of ranks changes, rank `r` takes the state
    of rank `r`, and additional ranks are seeded from the state of rank 0 and their own number, so
    that no two ranks draw the same numbers, and every restart draws the same.

    Devices are identified by index. If only one device of a process was used, its generator is
    restored on the current device, whatever its index.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the global generator
        version, words, gauss = random.getstate()
        return {
            "python": [version, list(words), gauss],
            "numpy": [
                str(kind),
                np.asarray(keys),
                *(float(r) if isinstance(r, float) else int(r) for r in rest),
            ],
            "torch": torch.get_rng_state(),
            "devices": list(devices.get_rng_state_all())
            if (devices := _devices()) and devices.is_initialized()
            else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators, or seed them with the result of `merge` for an additional rank.

        Args:
            state: as from `state_dict` or `merge`.

        Raises:
            UsageError: the generators of several devices were used, and there are fewer devices
                here; nothing changed.
        """
        by_device = _by_device(state)
        if "seed" in state:
            random.seed(state["seed"])
            np.random.seed(state["seed"] % (1 << 32))  # noqa: NPY002
            torch.manual_seed(state["seed"])
            return
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys), *rest))  # noqa: NPY002
        torch.set_rng_state(torch.as_tensor(state["torch"]))
        for device, states in by_device.items():
            _devices().set_rng_state(states, device)

    def settled(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what `state_dict` returns after a state is loaded; changes nothing.

        Args:
            state: as from `state_dict` or `merge`.

        Raises:
            UsageError: as from `load_state_dict`.
        """
        current = self.state_dict()["devices"]
        if "seed" not in state:
            by_device = _by_device(state)
            return state | {"devices": [by_device.get(i, now) for i, now in enumerate(current)]}
        version, words, gauss = random.Random(state["seed"]).getstate()  # noqa: S311 - no secret
        numpy = np.random.RandomState(state["seed"] % (1 << 32))
        kind, keys, *rest = numpy.get_state(legacy=True)
        accelerator = torch.accelerator.current_accelerator()
        generators = [torch.Generator(f"{accelerator}:{i}") for i in range(len(current))]
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, keys, *rest],
            "torch": torch.Generator().manual_seed(state["seed"]).get_state(),
            "devices": [g.manual_seed(state["seed"]).get_state() for g in generators],
        }

    def merge(self, values: list[Any], rank: int, ranks: int) -> Any:  # noqa: ARG002 - the signature of PerRank's
        """Return the state of a rank after the number of ranks has changed.

        Args:
            values: the saved states of all ranks.
            rank: the rank.
            ranks: how many there are now.
        """
        if rank < len(values):
            return values[rank]
        basis = json.dumps([np.asarray(values[0]["torch"]).tolist(), rank]).encode()
        return {"seed": int.from_bytes(hashlib.sha256(basis).digest()[:7], "little")}


def _devices() -> Any:
    """PyTorch's module of the accelerator, if there is one whose devices have generators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return module if hasattr(module, "get_rng_state_all") else None


def _by_device(state: dict[str, Any]) -> dict[int, torch.Tensor]:
    """The state for the generator of each device here."""
    saved = [torch.as_tensor(s) for s in state.get("devices", ())]
    module = _devices()
    device_count = module.device_count() if module is not None and saved else 0
    if not device_count:
        return {}
    drawn = [i for i, s in enumerate(saved) if _is_used(s)]
    if len(drawn) > 1 and drawn[-1] >= device_count:
        raise UsageError(
            f"the generators of the devices {', '.join(map(str, drawn))} were used when the "
            "state was saved, but only "
            f"{device_count} devices are visible now",
            hint="make as many devices visible, or leave Rng out of the state and set new seeds",
        )
    out = dict(enumerate(saved[:device_count]))
    if len(drawn) == 1:
        out[torch.accelerator.current_device_index()] = saved[drawn[0]]
    return out


def _is_used(state: torch.Tensor) -> bool:
    """Whether numbers were drawn since the generator was seeded; of CUDA, whether the offset is not zero."""
    return state.numel() != _CUDA_STATE_BYTES or bool(state[_CUDA_STATE_BYTES // 2 :].any())
