"""Tensors without values, and a recorder of where their elements go.

A tensor of a checkpoint is a `Recorded` tensor: PyTorch computes the shapes and strides of its
views on the meta device, and of the operations that make new memory those that only move elements
are recorded, as `Move`s. Any other operation is refused, by its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ucformat.errors import UnsupportedError, first_names
from ucformat.geometry.box import row_major
from ucformat.geometry.moves import FROM, TO, Move, NotBoxes, composed, remaining
from ucformat.torch.state.memory import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Constant(NamedTuple):
    """A number that elements are set to."""

    value: complex


class Foreign(NamedTuple):
    """What sets elements to values that do not come from the checkpoint."""

    operation: str


@dataclass(frozen=True, slots=True)
class Content:
    """Elements of a storage: of which tensor of the checkpoint they are, or else what they are, and their casts."""

    move: Move
    source: str | Constant | Foreign
    casts: tuple[str, ...] = ()
    span: tuple[int, int] = field(init=False)  # kept, since a stack of experts asks for it often

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", self.move.bounds(TO))


@dataclass(eq=False, slots=True)
class _Storage:
    """The memory of tensors, and what is in it."""

    memory: torch.UntypedStorage  # kept, so that no other one gets its address
    owner: str | None  # the parameter or buffer of which it is; None: it is temporary
    contents: list[Content] = field(default_factory=list)
    replaced: dict[str, None] = field(default_factory=dict)  # what had been there before

    def put(self, move: Move, contents: Iterable[Content]) -> None:
        """Replace elements."""
        contents = list(contents)
        left: list[Content] = []
        low, high = move.bounds(TO)
        for old in self.contents:
            if high <= old.span[0] or old.span[1] <= low:
                left.append(old)
                continue
            parts = remaining(old.move, move)
            if sum(part.size for part in parts) == old.move.size:
                left.append(old)
                continue
            if isinstance(old.source, str):
                self.replaced.setdefault(old.source)
            left += [replace(old, move=part) for part in parts]
        self.contents = [*left, *contents]

    def get(self, view: Move) -> Iterator[Content]:
        """What is in a view of it."""
        low, high = view.bounds(FROM)
        for content in self.contents:
            if high <= content.span[0] or content.span[1] <= low:
                continue
            for move in composed(view, content.move):
                yield replace(content, move=move)


class Recorded(torch.Tensor):
    """A tensor that has a shape, strides and a dtype, but no values."""

    inner: torch.Tensor  # on the meta device
    recorder: Recorder

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001

    @staticmethod
    def __new__(cls, inner: torch.Tensor, recorder: Recorder, device: torch.device) -> Recorded:  # noqa: PYI034
        """Wrap a tensor of the meta device."""
        made: Recorded = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner, made.recorder = inner, recorder
        return made

    def __repr__(self) -> str:
        return f"<recorded {dtype_name(self.dtype)} {list(self.shape)}>"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # what PyTorch calls
        """Record an operation."""
        recorded = next(t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Recorded))
        return recorded.recorder.run(func, args, kwargs or {})


class _Assignments(TorchFunctionMode):
    """Passes assignments of `Tensor.data` to a recorder; PyTorch would mix up the two kinds of tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and isinstance(args[1], Recorded):
            args = (args[0], self._recorder.assigned(*args))
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Passes all operations of a thread to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {})


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the strides: of a recorded one that of the meta device."""
    return tensor.inner if isinstance(tensor, Recorded) else tensor


def _on_meta(value: Any) -> Any:
    """An argument for an operation on the meta device."""
    if isinstance(value, Recorded):
        return value.inner
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


class Recorder:
    """Knows of each element of parameters and of temporary tensors from where it is."""

    def __init__(self) -> None:
        self.refused: UnsupportedError | None = None
        self._storages: dict[int, _Storage] = {}
        self._assigned: list[torch.Tensor] = []  # kept, so that no other memory gets their address
        self._lock = threading.RLock()  # Transformers loads with several threads

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context in which operations on parameters alone are recorded too."""
        with _Watch(self), _Assignments(self):
            yield

    def assigned(self, tensor: torch.Tensor, value: Recorded) -> torch.Tensor:
        """The memory that a parameter gets instead of a recorded tensor that is assigned to its `data`."""
        with self._lock:
            storage, inner = self._find(value), value.inner
            if storage is None or isinstance(tensor, Recorded):
                raise self.refuse("Tensor.data.__set__", [value])
            count = inner.untyped_storage().nbytes() // inner.element_size()
            memory = torch.empty(count, dtype=inner.dtype, device=tensor.device)
            self._storages[memory.untyped_storage()._cdata] = storage  # noqa: SLF001
            self._assigned.append(memory)
            return memory.as_strided(inner.shape, *_strided(inner))

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Recorded:
        """A tensor of the checkpoint."""
        with self._lock:
            inner = torch.empty(shape, dtype=dtype, device="meta")
            whole = Move.between(shape, (row_major(shape), 0), (row_major(shape), 0))
            self._add(inner).contents.append(Content(whole, name))
            return Recorded(inner, self, torch.device("cpu"))

    def destination(self, name: str, tensor: torch.Tensor) -> None:
        """Watch a parameter or buffer."""
        with self._lock:
            if self._find(tensor) is None:
                self._add(tensor, name)

    def replaced(self, tensor: torch.Tensor) -> list[str]:
        """The tensors of the checkpoint of which the memory of a tensor had elements before it got others."""
        with self._lock:
            storage = self._find(tensor)
            return [] if storage is None else list(storage.replaced)

    def place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """What is equal for two tensors that are the same view of the same memory."""
        memory = _memory(tensor)
        return (memory.untyped_storage()._cdata, tuple(memory.shape), *_strided(memory))  # noqa: SLF001

    def contents(self, tensor: torch.Tensor) -> list[Content]:
        """From where the elements of a tensor are, in row-major order."""
        with self._lock:
            storage = self._find(tensor)
            memory, shape = _memory(tensor), tuple(tensor.shape)
            view = Move.between(shape, (row_major(shape), 0), _strided(memory))
            return [] if storage is None else list(storage.get(view))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of PyTorch, and record it."""
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        with self._lock:
            recorded = [t for t in tensors if isinstance(t, Recorded)]
            watched = [t for t in tensors if self._find(t) is not None]
            name = func._schema.name.removeprefix("aten::")  # noqa: SLF001 - there is no other way
            if name in _CONSTANT:
                return self._constant(name, func, args, kwargs)
            if not watched:
                return func(*args, **kwargs)
            try:
                if name in _VIEWS:
                    return self._viewed(func, args, kwargs, recorded)
                if name in _MOVES:
                    return _MOVES[name](self, func, args, kwargs, recorded)
            except NotBoxes as error:
                raise self.refuse(func, watched, f": {error.message}") from error
            if recorded or any(self._values(t) for t in watched):
                raise self.refuse(func, watched)
            for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tree_flatten(value)[0]:  # of `_foreach_` operations, many
                        self.set(tensor, Foreign(str(func)))
            return func(*args, **kwargs)

    def refuse(self, func: Any, tensors: Sequence[torch.Tensor], why: str = "") -> UnsupportedError:
        """The error for an operation that is not recorded."""
        names = dict.fromkeys(
            name
            for t in tensors
            if (s := self._find(t)) is not None
            for name in (*(c.source for c in s.contents if isinstance(c.source, str)), s.owner)
            if name is not None
        )
        error = UnsupportedError(
            f"the loader applies {func} to {first_names(list(names), 3)}, which a layout cannot "
            f"say{why}",
            hint="only operations that move elements are captured: load this model by its engine",
        )
        self.refused = self.refused or error
        return error

    def _find(self, tensor: torch.Tensor) -> _Storage | None:
        try:
            memory = _memory(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # one that has none, such as a sparse tensor
            return None
        return self._storages.get(memory._cdata)  # noqa: SLF001

    def _add(self, tensor: torch.Tensor, owner: str | None = None) -> _Storage:
        memory = tensor.untyped_storage()
        storage = _Storage(memory, owner)
        self._storages[memory._cdata] = storage  # noqa: SLF001
        return storage

    def _values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have elements of the checkpoint."""
        storage = self._find(tensor)
        return storage is not None and any(isinstance(c.source, str) for c in storage.contents)

    def _constant(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor of one number, which may become padding."""
        out = func(*args, **kwargs)
        self._add(out)
        self.set(out, Constant(args[1] if name == "full" else int(name == "ones")))
        return out

    def _viewed(self, func: Any, args: Any, kwargs: Any, recorded: Sequence[Recorded]) -> Any:
        """Make a view."""
        source = args[0]
        if not recorded:
            out = func(*args, **kwargs)
        else:
            made = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
            out = tree_map(lambda t: self._wrapped(t, source.device), made)
        for view in tree_flatten(out)[0]:
            if isinstance(view, torch.Tensor) and view.dtype != source.dtype:
                raise self.refuse(func, [source])
        return out

    def _wrapped(self, value: Any, device: torch.device) -> Any:
        return Recorded(value, self, device) if isinstance(value, torch.Tensor) else value

    def made(
        self, func: Any, args: Any, kwargs: dict[str, Any], recorded: Sequence[Recorded]
    ) -> tuple[Any, torch.Tensor]:
        """A new tensor of an operation, and its memory, in which nothing is recorded yet."""
        if not recorded:
            out = func(*args, **kwargs)
            memory = out
        else:
            device = kwargs.get("device") or recorded[0].device
            left = {k: _on_meta(v) for k, v in kwargs.items() if k not in {"device", "pin_memory"}}
            memory = func(*tree_map(_on_meta, args), **left)
            out = Recorded(memory, self, torch.device(device))
        self._add(memory)
        return out, memory

    def move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Record that memory gets the values of other memory, of the same shape."""
        into, storage = self._find(to) or self._add(to), self._find(source)
        shape = tuple(to.shape)
        move = Move.between(shape, _strided(to), _strided(source))
        if storage is None:
            contents = [Content(move, Foreign("values that do not come from the checkpoint"))]
        else:
            casts = () if source.dtype == to.dtype else (dtype_name(to.dtype),)
            contents = [replace(c, casts=c.casts + casts) for c in storage.get(move)]
        into.put(move, contents)

    def set(self, tensor: torch.Tensor, source: Constant | Foreign) -> None:
        """Record that memory has values that do not come from the checkpoint."""
        storage, shape = self._find(tensor) or self._add(tensor), tuple(tensor.shape)
        move = Move.between(shape, _strided(tensor), ((0,) * len(shape), 0))
        storage.put(move, [Content(move, source)])


def _strided(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """The strides of a tensor in its memory, and its offset."""
    return tuple(tensor.stride()), int(tensor.storage_offset())


_Recorded = Sequence[Recorded]


def _copied(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`clone`, `to`, `contiguous`: a new tensor of the same values."""
    out, memory = recorder.made(func, args, kwargs, recorded)
    recorder.move(memory, _memory(args[0]))
    return out


def _joined(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`cat`."""
    out, memory = recorder.made(func, args, kwargs, recorded)
    dim, start = args[1] if len(args) > 1 else kwargs.get("dim", 0), 0
    for tensor in map(_memory, args[0]):
        if tensor.shape == (0,):  # which `cat` takes for nothing, whatever the others are
            continue
        part = memory.narrow(dim, start, tensor.shape[dim])
        recorder.move(part, tensor)
        start += tensor.shape[dim]
    return out


def _stacked(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`stack`."""
    out, memory = recorder.made(func, args, kwargs, recorded)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for index, tensor in enumerate(map(_memory, args[0])):
        recorder.move(memory.select(dim, index), tensor)
    return out


def _written(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`copy_`."""
    to, source = map(_memory, args[:2])
    recorder.move(to, source.expand(to.shape))
    return args[0] if recorded else func(*args, **kwargs)


def _filled(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`fill_`, `zero_`."""
    value = args[1] if len(args) > 1 else 0
    if isinstance(value, torch.Tensor):
        if recorded and isinstance(value, Recorded):
            return _written(recorder, func, args, kwargs, recorded)
        value = value.item()
    recorder.set(_memory(args[0]), Constant(value))
    return args[0] if isinstance(args[0], Recorded) else func(*args, **kwargs)


def _like(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`empty_like`, `new_zeros`, …: a new tensor that is empty, or of one number."""
    out, memory = recorder.made(func, args, kwargs, recorded)
    name = func._schema.name  # noqa: SLF001
    if "empty" not in name:
        full = args[2] if "new_full" in name else args[1] if "full" in name else None
        recorder.set(memory, Constant(int("ones" in name) if full is None else full))
    return out


def _padded(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`pad` with a number."""
    pads = list(args[1])
    if min(pads, default=0) < 0:
        raise recorder.refuse(func, [args[0]], " with a negative width")
    out, memory = recorder.made(func, args, kwargs, recorded)
    recorder.set(memory, Constant(args[2] if len(args) > 2 else kwargs.get("value", 0)))
    source, inside = _memory(args[0]), memory
    for dim, before in enumerate(pads[::2], 1):
        inside = inside.narrow(-dim, before, source.shape[-dim])
    recorder.move(inside, source)
    return out


def _indexed(
    recorder: Recorder, func: Any, args: Any, kwargs: dict[str, Any], recorded: _Recorded
) -> Any:
    """`index_select`, and indexing with one list of numbers."""
    if func._schema.name == "aten::index":  # noqa: SLF001
        given = [(d, t) for d, t in enumerate(args[1]) if t is not None]
        dim, index = given[0]
        if len(given) > 1 or index.dim() != 1 or index.dtype == torch.bool:
            raise recorder.refuse(func, [args[0]], " with several indices, or a mask")
    else:
        dim, index = args[1] % max(1, args[0].dim()), args[2]
    if isinstance(index, Recorded) or index.is_meta:
        raise recorder.refuse(func, [args[0]], " with indices that are not known")
    source = _memory(args[0])
    numbers = [i % source.shape[dim] for i in index.tolist()]
    out, memory = recorder.made(func, args, kwargs, recorded)
    # consecutive numbers minus their positions are equal
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        pairs = list(run)
        at, first = pairs[0]
        recorder.move(memory.narrow(dim, at, len(pairs)), source.narrow(dim, first, len(pairs)))
    return out


#: What makes views, by the name of PyTorch.
_VIEWS = frozenset(
    (
        *("alias", "detach", "lift_fresh", "view", "_unsafe_view", "_reshape_alias", "as_strided"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "unfold", "diagonal"),
        *("expand", "permute", "t", "transpose", "squeeze", "unsqueeze"),
    )
)

#: What makes tensors of one number.
_CONSTANT = frozenset(("zeros", "ones", "full"))

_Operation = Callable[[Recorder, Any, Any, dict[str, Any], _Recorded], Any]
#: What moves elements, and how it is recorded.
_MOVES: dict[str, _Operation] = {
    "clone": _copied,
    "_to_copy": _copied,
    "cat": _joined,
    "stack": _stacked,
    "copy_": _written,
    "fill_": _filled,
    "zero_": _filled,
    "constant_pad_nd": _padded,
    "index_select": _indexed,
    "index": _indexed,
    **dict.fromkeys(
        (
            *("empty_like", "zeros_like", "ones_like", "full_like"),
            *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
        ),
        _like,
    ),
}
