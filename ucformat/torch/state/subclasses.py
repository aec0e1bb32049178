"""Tensors whose values are not in memory of their own: taken apart by their class's protocol, or refused by name.

A wrapper subclass, such as the 8-bit states of torchao's optimizers, holds other tensors, and its
own memory holds nothing. If its class has `__tensor_flatten__`, these inner tensors are saved and
loaded in its place, under its path and their names. What else makes the wrapper, its class and its
context, is recorded as an object beside them. A load fills the inner tensors of the program's own
object, which must have the same record, so it needs no class from a checkpoint. Any other tensor
that is not strided, with memory of its own, is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import types
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ucformat.errors import LayoutError, UsageError
from ucformat.reading.values import to_json
from ucformat.torch.state.elements import span
from ucformat.torch.state.flat import FlatPart
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.tensor import DTensor

    Names = tuple[str, ...]

#: The key of the record of a wrapper, beside its inner tensors.
RECORD = "__subclass__"


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """A tensor inside a wrapper that is the local tensor of a DTensor.

    Attributes:
        tensor: the inner tensor on this rank.
        shape: its shape, if the DTensor were on one rank.
        along: for each sharded dim of the DTensor that also splits the inner tensor, the dim that
            it splits, and how many of its indices belong to one index of the DTensor's dim.
    """

    outer: DTensor
    tensor: torch.Tensor
    shape: tuple[int, ...]
    along: Mapping[int, tuple[int, Fraction]]

    def size(self) -> tuple[int, ...]:
        """Return the shape, as of a DTensor."""
        return self.shape


@dataclass(frozen=True, slots=True)
class TakenApart:
    """A wrapper that was taken apart: its inner tensors, and the record of each wrapper, by the names below it."""

    tensors: Mapping[Names, torch.Tensor | InnerTensor]
    records: Mapping[Names, Mapping[str, Any]]


def why_refused(tensor: torch.Tensor) -> str | None:
    """Say what a tensor is, if it is not strided with memory of its own, or a view of such memory; None: it is."""
    if is_usual(tensor):
        return None
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return f"a {type(tensor).__name__}"
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - a subclass may answer for its memory
        return _why_refused(tensor)


def _tensors_of(tensor: torch.Tensor) -> list[str]:
    """The attributes of a tensor that are tensors, or have some: what it is without them, is not known."""
    return [
        name
        for name, value in vars(tensor).items()
        if any(
            isinstance(v, torch.Tensor) for v in (value, *getattr(value, "__dict__", {}).values())
        )
    ]


def is_subclass(tensor: torch.Tensor) -> bool:
    """Check whether Python code of a tensor's class does what is asked of it, so that its own memory means nothing."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))  # noqa: SLF001


def is_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what most are: plain, on the host, with all of its memory. Says so in a third of the time."""
    if type(tensor) not in _PLAIN_TYPES:  # whose methods no subclass answers
        return False
    # another layout, device or transformation has keys of its own
    keys = torch._C._dispatch_keys(tensor).raw_repr()  # noqa: SLF001 - as in `_why_refused`
    if keys & ~_host_keys():
        return False
    if not (size := tensor.numel()):
        return True
    dense = tensor.is_contiguous()
    end = (tensor.storage_offset() + size) * tensor.itemsize if dense else _end(tensor)
    return bool(tensor.untyped_storage().nbytes() >= end)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@lru_cache
def _host_keys() -> int:
    return _plain_keys(torch.device("cpu"))


def _why_refused(tensor: torch.Tensor) -> str | None:
    keys = torch._C._dispatch_keys(tensor)  # noqa: SLF001 - what computes with it: nothing else tells all kinds
    if keys.has(torch._C.DispatchKey.Python):  # noqa: SLF001 - as in `is_subclass`
        return f"a {class_name(type(tensor))}"
    attributes = () if type(tensor) in _PLAIN_TYPES else _tensors_of(tensor)
    if attributes:
        return f"a {class_name(type(tensor))} with tensors as attributes ({', '.join(attributes)})"
    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.device.type != "cpu":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or tensor.device.type != accelerator.type:
            return f"a tensor on the device {tensor.device}"
    unknown_keys = keys.raw_repr() & ~_plain_keys(tensor.device)
    if unknown_keys:
        names = str(torch._C.DispatchKeySet.from_raw_repr(unknown_keys))  # noqa: SLF001
        return f"a tensor with the dispatch keys {names.removeprefix('DispatchKeySet')}"
    if tensor.numel() and tensor.untyped_storage().nbytes() < _end(tensor):
        return "a freed tensor"
    return None


@lru_cache
def _plain_keys(device: torch.device) -> int:
    """The dispatch keys that a plain tensor, a lazy conjugate and a lazy negative on a device may have."""
    views = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)  # noqa: SLF001
    with torch.inference_mode(mode=False):
        keys = int(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())  # noqa: SLF001
    for view in views:
        keys |= int(torch._C.DispatchKeySet(view).raw_repr())  # noqa: SLF001
    return keys


def _end(tensor: torch.Tensor) -> int:
    """The byte of the storage after a tensor's last element."""
    size = tensor.element_size()
    return int(tensor.storage_offset() * size + span(tensor.shape, tensor.stride(), size))


def check_memory(label: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has memory of its own, or is a view of such memory."""
    kind = why_refused(tensor)
    if kind is not None:
        raise UsageError(f"{label} is {kind}, which has no plain memory", hint=_hint_for(tensor))


def own_memory(label: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without autograd and subclass, in its memory; lazy conjugates and negatives stay lazy."""
    check_memory(label, tensor)
    return _detached(tensor)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
        return torch.Tensor.detach(tensor)


def plain_values(label: str, tensor: torch.Tensor, *, checked: bool = False) -> torch.Tensor:
    """Return a tensor without autograd and subclass, whose memory has its values: of a lazy one a copy.

    Args:
        checked: `check_memory` has accepted it.
    """
    plain = _detached(tensor) if checked else own_memory(label, tensor)
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def _hint_for(tensor: torch.Tensor) -> str:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "run the module once on a batch, which gives it a shape"
    if tensor.is_meta:
        return "give it memory first: model.to_empty(device=…)"
    if is_subclass(tensor):
        return (
            "use the plain tensor that it stands for, or give its class __tensor_flatten__ "
            "and __tensor_unflatten__"
        )
    return "make it a dense tensor first"


def local_of_dtensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor itself, when collectives that make it are done."""
    local: torch.Tensor
    if torch.is_grad_enabled():  # then it is a view, and of a wrapper perhaps a copy
        with torch.no_grad():
            local = tensor.to_local()
    else:
        local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def memory_of(tensor: torch.Tensor | InnerTensor | FlatPart) -> torch.Tensor:
    """Return the tensor of this rank that has the memory: of a DTensor the local one."""
    if isinstance(tensor, InnerTensor | FlatPart):
        return tensor.tensor
    return local_of_dtensor(tensor) if is_dtensor(tensor) else tensor


def take_apart(label: str, tensor: torch.Tensor) -> TakenApart | None:
    """Take a wrapper, or a DTensor whose local tensor is one, apart; None if it is neither."""
    outer = tensor if is_dtensor(tensor) else None
    local = memory_of(tensor)
    if isinstance(local, AsyncCollectiveTensor):
        waited = local.wait()
        check_memory(label, waited)
        return TakenApart({(): waited}, {})
    if not _is_wrapper(local):
        check_memory(label, local)
        return None
    nodes = _Nodes(label, local)
    splits = _Splits(label, outer, local, nodes)
    tensors = {names: splits.inner(names, t) for names, t in nodes.tensors.items()}
    return TakenApart(
        tensors,
        {names: _record(label, names, w, nodes, splits) for names, w in nodes.wrappers.items()},
    )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided wrapper subclass that can be taken apart."""
    return (
        type(tensor) not in _PLAIN_TYPES
        and is_traceable_wrapper_subclass(tensor)
        and not (is_dtensor(tensor) or isinstance(tensor, AsyncCollectiveTensor))
        and tensor.layout is torch.strided
        and all(type(n) is int for n in tensor.shape)
    )


class _Nodes:
    """The wrappers and the innermost tensors of a wrapper, by the names of attributes that lead to them.

    Attributes:
        tensors: those with memory of their own, each view of it once.
        same: of further names of a view, the first.
    """

    def __init__(self, label: str, wrapper: torch.Tensor) -> None:
        self.label = label
        self.wrappers: dict[Names, torch.Tensor] = {}
        self.contexts: dict[Names, Any] = {}
        self.inner: dict[Names, list[str]] = {}
        self.tensors: dict[Names, torch.Tensor] = {}
        self.same: dict[Names, Names] = {}
        self._within: list[torch.Tensor] = []
        self._add((), wrapper)
        self._find_views()

    def _add(self, names: Names, tensor: torch.Tensor) -> None:
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if not _is_wrapper(tensor):
            if names:
                local = memory_of(tensor) if is_dtensor(tensor) else tensor
                own_memory(".".join((self.label, *names)), local)
            self.tensors[names] = tensor
            return
        if any(tensor is w for w in self._within):
            raise self._refused(names, tensor, "contains itself")
        self._within.append(tensor)
        self.wrappers[names] = tensor
        self.inner[names], self.contexts[names] = self._flattened(names, tensor)
        for name in self.inner[names]:
            try:
                inner = getattr(tensor, name)
            except Exception as error:
                raise self._refused(
                    names, tensor, f"has no inner tensor {name}: {error}"
                ) from error
            if not isinstance(inner, torch.Tensor):
                raise self._refused(
                    names, tensor, f"has a {type(inner).__name__} as {name}, which is not a tensor"
                )
            self._add((*names, name), inner)
        self._within.pop()

    def _flattened(self, names: Names, tensor: Any) -> tuple[list[str], Any]:
        """The names of the inner tensors, and the context."""
        try:
            inner, context = tensor.__tensor_flatten__()
            inner = list(inner)
        except Exception as error:
            raise self._refused(
                names, tensor, f"cannot be taken apart: {type(error).__name__}: {error}"
            ) from error
        invalid = [n for n in inner if not isinstance(n, str) or not n or n == RECORD]
        if invalid or len(set(inner)) < len(inner):
            raise self._refused(names, tensor, f"names its inner tensors {inner}")
        return inner, context

    def _refused(self, names: Names, tensor: torch.Tensor, why: str) -> UsageError:
        where = ".".join((self.label, *names))
        return UsageError(
            f"{where} is a {class_name(type(tensor))}, which {why}", hint=_hint_for(tensor)
        )

    def _find_views(self) -> None:
        """Find inner tensors that are the same view; UsageError if others share memory."""
        for (a, first), (b, second) in combinations(
            [(n, memory_of(t)) for n, t in self.tensors.items()], 2
        ):
            if a in self.same or b in self.same or not _overlap(first, second):
                continue
            if _view(first) != _view(second):
                raise UsageError(
                    f"{self.label}: its inner tensors {'.'.join(a)} and {'.'.join(b)} share a "
                    "part of their memory",
                    hint="give each its own memory: tensor.clone()",
                )
            self.same[b] = a
        for names in self.same:
            del self.tensors[names]


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes two tensors the same view of memory."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory of two tensors, from the first to the last element, has bytes in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    ends = [t.data_ptr() + span(t.shape, t.stride(), t.element_size()) for t in (a, b)]
    return bool(a.data_ptr() < ends[1] and b.data_ptr() < ends[0])


def check_live(label: str, tensor: torch.Tensor, contents: TakenApart) -> None:
    """Check that what a wrapper gives as its inner tensors is its own memory, which a load can fill."""
    retaken = take_apart(label, tensor)
    for names, inner in contents.tensors.items():
        other = None if retaken is None else retaken.tensors.get(names)
        if other is None or _view(memory_of(inner)) != _view(memory_of(other)):
            raise UsageError(
                f"{label} is a {class_name(type(memory_of(tensor)))}, whose {'.'.join(names)} is a "
                "new copy each time",
                hint=(
                    "a load fills the inner tensors where they are: let the attribute be the "
                    "tensor itself"
                ),
            )


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a wrapper, or of a DTensor of one, on the host; its own class makes it of copies."""
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor  # which takes time, and is imported then

        local = copy_to_host(local_of_dtensor(tensor))
        return DTensor(local, tensor._spec, requires_grad=False)  # noqa: SLF001 - from_local moves it to the device
    if not _is_wrapper(tensor):
        return tensor.detach().to("cpu", copy=True)
    names, context = tensor.__tensor_flatten__()
    inner = {name: copy_to_host(getattr(tensor, name)) for name in names}
    copied: torch.Tensor = type(tensor).__tensor_unflatten__(
        inner, context, tensor.shape, tensor.stride()
    )
    return copied


class _Splits:
    """How the shards of a DTensor split what is inside its local tensor, a wrapper."""

    def __init__(
        self, label: str, outer: DTensor | None, local: torch.Tensor, nodes: _Nodes
    ) -> None:
        self.label, self.outer, self.local, self.nodes = label, outer, local, nodes
        self.dims: list[int] = []
        if outer is None:
            return
        if any(p.is_partial() for p in outer.placements):
            raise LayoutError(
                f"{label} is partial over its mesh: each rank holds one summand",
                hint="reduce it first: tensor.redistribute(placements=[Replicate() …])",
            )
        self.dims = sorted({p.dim for p in outer.placements if not p.is_replicate()})
        self._sliced = {d: slices for d in self.dims if (slices := self._slice(d)) is not None}

    def _slice(self, dim: int) -> tuple[int, dict[Names, tuple[int, ...]]] | None:
        """The shapes of what is inside if the class slices the wrapper, and to how many indices; None if it cannot."""
        size = self.local.shape[dim]
        counts = (
            dict.fromkeys([*(size >> n for n in range(1, size.bit_length())), 0]) if size else ()
        )
        # several lengths, since a class may slice only at the edges of its blocks
        for count in counts:
            try:
                with torch.no_grad():
                    part = torch.ops.aten.slice.Tensor(self.local, dim, 0, count)
                    nodes = _Nodes(self.label, part) if type(part) is type(self.local) else None
            except Exception:  # noqa: BLE001, S112 - the class does not do that
                continue
            if (
                nodes is None
                or part.shape[dim] != count
                or _shapes(nodes).keys() != _shapes(self.nodes).keys()
            ):
                continue
            return count, _shapes(nodes)
        return None

    def inner(self, names: Names, tensor: torch.Tensor) -> torch.Tensor | InnerTensor:
        """An inner tensor, with how it is sharded if the wrapper is that of a DTensor."""
        if self.outer is None:
            return tensor
        if is_dtensor(tensor):
            raise LayoutError(
                f"{self.label}.{'.'.join(names)} is a DTensor inside the local tensor of another "
                "one"
            )
        shape = tuple(tensor.shape)
        along = self.along(names, shape)
        return InnerTensor(self.outer, tensor, self.whole(names, shape, along), along)

    def whole(
        self, names: Names, shape: tuple[int, ...], along: Mapping[int, tuple[int, Fraction]]
    ) -> tuple[int, ...]:
        """The shape on one rank of what has a shape on this one."""
        out = list(shape)
        for dim, (inner, ratio) in along.items():
            assert self.outer is not None  # noqa: S101 - nothing is sharded otherwise
            size = self.outer.shape[dim] * ratio
            if size.denominator != 1:
                raise self._unknown(
                    names, shape, f"a shard has {ratio} of its indices for each of its own"
                )
            out[inner] = size.numerator
        return tuple(out)

    def along(self, names: Names, shape: tuple[int, ...]) -> dict[int, tuple[int, Fraction]]:
        """The dims of something inside that the sharded dims split."""
        out: dict[int, tuple[int, Fraction]] = {}
        for dim in self.dims:
            find = self._from_slice if dim in self._sliced else self._from_shape
            dims = find(names, shape, dim)
            if dims is not None and dims[0] in {inner for inner, _ in out.values()}:
                raise self._unknown(names, shape, "two sharded dims split the same one")
            if dims is not None:
                out[dim] = dims
        return out

    def _from_slice(
        self, names: Names, shape: tuple[int, ...], dim: int
    ) -> tuple[int, Fraction] | None:
        count, shapes = self._sliced[dim]
        part, size = shapes[names], self.local.shape[dim]
        if part == shape:
            return None
        differ = [d for d, (a, b) in enumerate(zip(part, shape, strict=True)) if a != b]
        if len(differ) != 1 or part[differ[0]] * size != shape[differ[0]] * count:
            raise self._unknown(
                names, shape, f"its class makes it {list(part)} in a slice of {count} of {size}"
            )
        return differ[0], Fraction(shape[differ[0]], size)

    def _from_shape(
        self, names: Names, shape: tuple[int, ...], dim: int
    ) -> tuple[int, Fraction] | None:
        """What follows from the shape: it is that of the wrapper, or has one index for several of a dim, or is one."""
        outer = tuple(self.local.shape)
        if shape == outer:
            return dim, Fraction(1)
        if math.prod(shape) == 1 and len(shape) != len(outer):
            return None
        if (
            not outer[dim]
            or len(shape) != len(outer)
            or any(not n or m % n for m, n in zip(outer, shape, strict=True))
        ):
            raise self._unknown(names, shape, f"its class does not slice dim {dim}")
        whole = shape[dim] == 1 and outer[dim] > 1
        return None if whole else (dim, Fraction(shape[dim], outer[dim]))

    def _unknown(self, names: Names, shape: Sequence[int], why: str) -> LayoutError:
        return LayoutError(
            f"{self.label} is a sharded DTensor of a {class_name(type(self.local))}: how the "
            "shards split its inner "
            f"{'.'.join(names)} {list(shape)} is not known: {why}",
            hint=(
                "gather it on each rank first (tensor.full_tensor()), or let its class "
                "implement aten.slice.Tensor"
            ),
        )


def _shapes(nodes: _Nodes) -> dict[Names, tuple[int, ...]]:
    return {names: tuple(t.shape) for names, t in [*nodes.wrappers.items(), *nodes.tensors.items()]}


def _record(
    label: str, names: Names, wrapper: torch.Tensor, nodes: _Nodes, splits: _Splits
) -> dict[str, Any]:
    """What makes a wrapper besides its inner tensors, in JSON form; the same under each layout."""
    shape = tuple(wrapper.shape)
    whole = splits.whole(names, shape, splits.along(names, shape)) if splits.dims else shape
    try:
        context = to_json(_plain(nodes.contexts[names], shape, whole))
    except Exception as error:
        where, kind = ".".join((label, *names)), class_name(type(wrapper))
        raise UsageError(
            f"{where} is a {kind}, whose context (the second value of __tensor_flatten__) is not "
            f"plain: {error}",
            hint=(
                "let the context consist of numbers, texts, data types, and lists and "
                "dictionaries of these"
            ),
        ) from error
    record = {
        "class": class_name(type(wrapper)),
        "context": context,
        "tensors": nodes.inner[names],
        "shape": list(whole),
        "dtype": str(wrapper.dtype).removeprefix("torch."),
    }
    same = {".".join(b): ".".join(a) for b, a in nodes.same.items()}
    return record | ({"same": same} if same and not names else {})


def _plain(value: Any, shape: tuple[int, ...], whole: tuple[int, ...]) -> Any:
    """A context as plain values, of which equal ones mean equal contexts; shapes of a shard are those of the whole."""

    def inner(part: Any) -> Any:
        return _plain(part, shape, whole)

    if value is None or type(value) in (bool, int, float, str, bytes, complex):
        return value
    if isinstance(value, torch.device):
        return {"name": "torch.device"}  # that of the program's own tensors counts
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"name": str(value)}
    if isinstance(value, enum.Enum):
        return {"name": f"{class_name(type(value))}.{value.name}"}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return {"name": _imported_name(value)}
    if type(value) in (list, tuple, torch.Size):
        same = tuple(value) == shape and shape and all(type(n) is int for n in value)
        return list(whole) if same else [inner(v) for v in value]
    if type(value) is dict:
        return {"dict": sorted(([inner(k), inner(v)] for k, v in value.items()), key=repr)}
    if type(value) in (set, frozenset):
        return {"set": sorted((inner(v) for v in value), key=repr)}
    fields = _fields(value)
    if fields is not None:
        return {
            "class": class_name(type(value)),
            "fields": {n: inner(getattr(value, n)) for n in fields},
        }
    raise TypeError(f"a {class_name(type(value))}")


def _fields(value: Any) -> Sequence[str] | None:
    """The names of all that a named tuple or a data class consists of; None if it is neither, or has more."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value._fields)
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else None
    return (
        names if names is not None and set(getattr(value, "__dict__", ())) <= set(names) else None
    )


def _imported_name(value: Any) -> str:
    """The name by which a module has a class or a function; TypeError if it is another one, or local."""
    name = f"{value.__module__}.{value.__qualname__}"
    holder: Any = sys.modules.get(value.__module__ or "")
    for part in value.__qualname__.split("."):
        holder = getattr(holder, part, None)
    if holder is not value:
        raise TypeError(f"{name}, which its module does not have")
    return name


def class_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
