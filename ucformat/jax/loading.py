"""`load` fills a tree of arrays under any shardings from any checkpoint; `load_arrays` reads what a checkpoint has."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, StateMismatch, UsageError, first_lines
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece
from ucformat.jax.ranks import processes_for_call
from ucformat.jax.shards import box_of, mesh_axes
from ucformat.jax.trees import data_shape, infos_of, leaves_of, random_keys_of
from ucformat.reading.dtypes import numpy_dtype
from ucformat.reading.execute import ReadOptions, read_items
from ucformat.reading.plan import check_verify
from ucformat.reading.rank import LOAD_INVALID, item_for
from ucformat.reading.readable import TRACKERS
from ucformat.reading.trees import random_keys_in
from ucformat.reading.values import from_json
from ucformat.references import open_reference
from ucformat.storage.cache.scope import consistent
from ucformat.storage.concurrency import grouped
from ucformat.storage.url import as_strings
from ucformat.storage.wrappers import checking_unchanged
from ucformat.torch.comm.group import TIMEOUT
from ucformat.torch.loading.match import Problems, edge_of, fits, stored_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.jax.trees import Leaf
    from ucformat.reading.plan import Verify
    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Rename

__all__ = ["Loaded", "load", "load_arrays"]

_BATCH_BYTES = 256 << 20  # of arrays that are read to host memory before they are on their devices
_MOST_LINES = 50  # of an error that lists what does not fit


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load; true if all that the checkpoint has of what was asked for is in the state.

    `state` is the tree with the arrays that were loaded. It is false if `left` has entries: what the
    checkpoint has of the entries at the root of the tree and the tree has no place for, unless
    `leave` named it.

    `url`, `id` and `step` are those of the checkpoint, and `tensors` is the number of arrays.
    `nbytes` are the bytes that this process read from storage; `bytes_unverified` are those whose
    checksums were not checked. `seconds` is the duration on this process. `lineage` describes how
    later checkpoints derive from this one, for `save(lineage=[loaded.lineage])`.
    """

    state: Any
    url: str
    id: str
    step: int | None
    tensors: int
    nbytes: int
    bytes_unverified: int
    seconds: float
    lineage: LineageDoc
    left: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.left


class _Wanted(NamedTuple):
    """An array to make: the stored tensor, the sharding (None: of NumPy), and the kind of its random keys, if any."""

    stored: TensorInfo
    sharding: Any
    random_keys: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of what this process holds."""
        return sum(box.size for box in self.boxes) * self.stored.itemsize

    @property
    def boxes(self) -> dict[Box, list[Any]]:
        """The boxes that this process holds, each with the devices that do."""
        if self.sharding is None:
            return {Box.whole(self.stored.shape): []}
        boxes: dict[Box, list[Any]] = {}
        indices = self.sharding.addressable_devices_indices_map(self.stored.shape)
        for device, index in indices.items():
            boxes.setdefault(box_of(index, self.stored.shape), []).append(device)
        return boxes


def load(
    target: Any,
    ref: str | PathLike[str] | Checkpoint,
    *,
    strict: bool = False,
    rename: Rename | None = None,
    leave: str | Iterable[str] = (),
    lossy: bool = False,
    verify: Verify = "whole",
    threads: int | None = None,
    timeout: float = TIMEOUT,
) -> Loaded:
    """Read a tree of arrays from a checkpoint of any kind; all processes call this together.

    Each process reads only what its devices hold. All mismatches are found before anything is read,
    and raised in one error on all processes. Nothing is cast.

    Args:
        target: a tree of the arrays to make: `jax.ShapeDtypeStruct` with a sharding, or arrays, of
            which shape, dtype and sharding count; NumPy arrays, numbers and text are read as such.
        ref: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        strict: whether what the checkpoint has and the tree has no place for is an error, too.
        rename: maps names of the checkpoint to names of the tree: a function, or `{regex:
            replacement}`, where the regex matches the whole name.
        leave: what of the checkpoint needs no place in the tree: names, prefixes of names that end
            at a dot, or globs.
        lossy: load states that were encoded with loss.
        verify: which checksums to check, as for `ucformat.torch.load`.
        threads: how many threads read on this process (default: as many as the storage can use).
        timeout: seconds after which an unresponsive process is considered dead.

    Raises:
        StateMismatch: the checkpoint does not fit the tree; the message lists all mismatches.
        UsageError: a leaf of the tree cannot be loaded.
        ChecksumError: a chunk does not match its checksum.
        Conflict: a file of the checkpoint has changed since it was opened.
        UcformatError: a process failed or died. Every process gets the same error.
    """
    begun = time.monotonic()
    with processes_for_call("load", ref, timeout) as ranks:
        with ranks.sharing_errors():
            reading = ReadOptions(check_verify(verify), threads=threads)
            ck = _opened(ref, lossy=lossy)
            leaves, structure = leaves_of(target)
            matched = _Match(ck, leaves, rename)
            left = matched.left(as_strings(leave))
            matched.check(left if strict else ())
        arrays, amount = _read_together(ck, list(matched.arrays.values()), ranks, reading)
        made = dict(zip(matched.arrays, arrays, strict=True)) | matched.values
        values = [made.get(number, leaf.value) for number, leaf in enumerate(leaves)]
        state = jax.tree_util.tree_unflatten(structure, values)
        return _loaded(state, ck, matched.arrays.values(), ranks, amount, begun, left)


def load_arrays(
    ref: str | PathLike[str] | Checkpoint,
    sharding: Callable[[TensorInfo], Any] | Any,
    *,
    lossy: bool = False,
    verify: Verify = "whole",
    threads: int | None = None,
    timeout: float = TIMEOUT,
) -> Loaded:
    """Read tensors of a checkpoint of any kind as arrays, without a tree; all processes call this together.

    The state of what is returned is a dictionary of the states, with a dictionary of arrays by name
    for each: `{"weight": {name: array}, "mu": …}`. Names of tied tensors have the same array.

    Args:
        ref: as for `load`.
        sharding: the sharding of all arrays, or a function that returns that of a tensor, whose
            `name`, `state`, `dtype` and `shape` it is given; None: the tensor is left out.
        lossy: as for `load`.
        verify: as for `load`.
        threads: as for `load`.
        timeout: as for `load`.

    Raises:
        UsageError: JAX has no arrays of a dtype, or has them only in 64-bit mode.
        UcformatError: as for `load`.
    """
    begun = time.monotonic()
    with processes_for_call("load_arrays", ref, timeout) as ranks:
        with ranks.sharing_errors():
            reading = ReadOptions(check_verify(verify), threads=threads)
            ck = _opened(ref, lossy=lossy)
            wanted: list[_Wanted] = []
            for info in ck.tensors.values():
                of_tensor = sharding(info) if callable(sharding) else sharding
                if of_tensor is not None:
                    _check_dtype(str(info.key), info.dtype)
                    wanted.append(_Wanted(info, of_tensor))
        arrays, amount = _read_together(ck, wanted, ranks, reading)
        state: dict[str, dict[str, Any]] = {}
        for w, array in zip(wanted, arrays, strict=True):
            state.setdefault(w.stored.state, {})[w.stored.name] = array
        for by_name in state.values():
            by_name |= {a: by_name[name] for a, name in ck.aliases.items() if name in by_name}
        return _loaded(state, ck, wanted, ranks, amount, begun)


def _opened(ref: str | PathLike[str] | Checkpoint, *, lossy: bool) -> Checkpoint:
    ck = ref if isinstance(ref, Checkpoint) else open_reference(ref)
    return ck.with_lossy() if lossy else ck


def _loaded(
    state: Any,
    ck: Checkpoint,
    wanted: Iterable[_Wanted],
    ranks: Group,
    amount: _Amount,
    begun: float,
    left: tuple[str, ...] = (),
) -> Loaded:
    wanted = list(wanted)
    layout = {"world": ranks.size} | dict(mesh_axes([w.sharding for w in wanted]))
    lineage = edge_of(ck, layout, continues=any(w.stored.state != "weight" for w in wanted))
    seconds = time.monotonic() - begun
    return Loaded(
        *(state, ck.url, ck.id, ck.metadata.step, len(wanted)),
        *(amount.nbytes, amount.unverified, seconds, lineage, left),
    )


class _Match:
    """The leaves of a target, and what of a checkpoint each of them is; problems are kept until `check`.

    Attributes:
        arrays: what is read, by the number of the leaf.
        values: the values of leaves that are no arrays, likewise.
    """

    def __init__(self, ck: Checkpoint, leaves: Sequence[Leaf], rename: Rename | None) -> None:
        self._ck, self._leaves = ck, leaves
        self.arrays: dict[int, _Wanted] = {}
        self.values: dict[int, Any] = {}
        self._missing: list[str] = []
        self._shapes: list[str] = []
        self._dtypes: list[str] = []
        self._others: list[str] = []
        self._asked: set[Key] = set()
        self._impls = random_keys_in(ck.objects)
        by_path = {p: key for key, paths in ck.metadata.paths.items() for p in paths}
        names = stored_names(ck, rename)
        numbers = [n for n, leaf in enumerate(leaves) if leaf.is_array]
        for number, info in zip(numbers, infos_of([leaves[n] for n in numbers]), strict=True):
            leaf = leaves[number]
            stored = (
                ck.tensors.get(by_path[leaf.path]) if leaf.path in by_path and not rename else None
            )
            if stored is None and info.name in names:
                stored = ck.tensors.get(info.key._replace(name=names[info.name]))
            self._array(number, leaf, info, stored)
        for number, leaf in enumerate(leaves):
            if not leaf.is_array and not leaf.empty:
                self._value(number, leaf)

    def _array(self, number: int, leaf: Leaf, info: TensorInfo, stored: TensorInfo | None) -> None:
        if stored is None:
            reason = self._ck.unreadable.get(info.key)
            dropped = self._ck.dropped.get(info.state)
            if reason is not None:
                self._others.append(f"{info.key} in the checkpoint {reason}")
            elif dropped is not None:
                self._others.append(f"tensors ({info.state}) in the checkpoint were {dropped}")
            else:
                self._missing.append(str(info.key))
            return
        self._asked.add(stored.key)
        if stored.shape != info.shape:
            self._shapes.append(
                f"{info.key} is {list(info.shape)}, in the checkpoint {list(stored.shape)}"
            )
        elif stored.dtype != info.dtype:
            self._dtypes.append(f"{info.key} is {info.dtype}, in the checkpoint {stored.dtype}")
        elif isinstance(leaf.value, np.ndarray):
            self.arrays[number] = _Wanted(stored, None)
        else:
            impl = random_keys_of(leaf).impl if leaf.is_random_key else ""
            saved = self._saved_impl(stored, impl)
            if saved != impl:
                here = f"random keys of {impl}" if impl else "an array of numbers"
                self._others.append(
                    f"{leaf.name} is {here}, and was saved as random keys of {saved}: "
                    "the target has to have such keys (jax.random.key)"
                )
            _check_dtype(leaf.name, info.dtype)
            self.arrays[number] = _Wanted(stored, _sharding_of(leaf), impl)

    def _saved_impl(self, stored: TensorInfo, default: str) -> str:
        """The implementation of the random keys as which a tensor was saved; the default if nothing says it."""
        paths = self._ck.metadata.paths.get(stored.key, ())
        names = [".".join(map(str, path)) for path in paths] or [stored.name]
        return next((self._impls[name] for name in names if name in self._impls), default)

    def _value(self, number: int, leaf: Leaf) -> None:
        label = f"the value {leaf.name}"
        if leaf.name not in self._ck.objects:
            is_tensor = any(key.name == leaf.name for key in self._ck.tensors)
            here = f"{label} is a {type(leaf.value).__name__}, in the checkpoint an array"
            (self._others if is_tensor else self._missing).append(here if is_tensor else label)
            return
        value = from_json(self._ck.objects[leaf.name])
        value = value[()] if isinstance(value, np.ndarray) and not value.shape else value
        if type(value) is not type(leaf.value):
            kind, stored = type(leaf.value).__name__, type(value).__name__
            self._others.append(f"{label} is a {kind}, in the checkpoint a {stored}")
        self.values[number] = value

    def left(self, leave: Sequence[str]) -> tuple[str, ...]:
        """Return what the tree has no place for, among what the checkpoint has of the entries at its root."""
        roots = {str(leaf.path[0]) for leaf in self._leaves if leaf.path}
        out = []
        for key in self._ck.tensors.keys() - self._asked:
            paths = self._ck.metadata.paths.get(key, ())
            asked = not paths or any(str(path[0]) in roots for path in paths)
            named = leave and any(
                fits(text, *leave) for text in (key.name, *(".".join(map(str, p)) for p in paths))
            )
            if asked and not named:
                out.append(str(key))
        values = {self._leaves[n].name for n in self.values}
        out += [
            f"the value {name}"
            for name in self._ck.objects.keys() - values
            if name.partition(".")[0] in roots and not fits(name, *leave)
        ]
        return tuple(sorted(out))

    def check(self, unexpected: Sequence[str]) -> None:
        """Raise what was found, and what is unexpected."""
        problems = Problems(
            *(tuple(self._missing), tuple(unexpected), tuple(self._shapes)),
            *(tuple(self._dtypes), tuple(self._others)),
        )
        lines = problems.lines(unexpected=True)
        if not lines:
            return
        hints = []
        if problems.missing:
            hints.append("rename=, or a view, maps the checkpoint's names to those of the tree")
        if problems.dtypes:
            hints.append('a view casts: ckpt.view([{"cast": "*", "dtype": …}])')
        if problems.unexpected:
            hints.append("leave= names what has no place in the tree")
        raise StateMismatch(
            f"{self._ck.url} does not fit the tree to be loaded; nothing was read:\n  "
            + "\n  ".join(first_lines(lines, _MOST_LINES)),
            hint="; ".join(hints) or None,
        )


def _sharding_of(leaf: Leaf) -> Any:
    """The sharding that a leaf of a target has."""
    sharding = getattr(leaf.value, "sharding", None)
    if sharding is None:
        devices = jax.devices()
        if len(devices) > 1:
            raise UsageError(
                f"{leaf.name} has no sharding, and there are {len(devices)} devices",
                hint="jax.ShapeDtypeStruct(shape, dtype, sharding=…)",
            )
        return SingleDeviceSharding(devices[0])
    if leaf.is_random_key and not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        raise UsageError(
            f"{leaf.name} has random keys under a {type(sharding).__name__}",
            hint="jax.sharding.NamedSharding",
        )
    try:
        sharding.shard_shape(data_shape(leaf))
    except ValueError as error:
        raise UsageError(
            f"{leaf.name} cannot be sharded so: {str(error).splitlines()[0]}",
            hint="JAX cuts dims only into equal parts: choose another sharding",
        ) from error
    return sharding


def _check_dtype(label: str, name: str) -> None:
    """Check that JAX has arrays of a dtype, and does not narrow it.

    Raises:
        UsageError: it has none, or has them only in 64-bit mode.
    """
    dtype = numpy_dtype(name)
    if not _has_arrays_of(name):
        raise UsageError(
            f"{label} is {name}, of which JAX has no arrays", hint="read it by ucformat.open"
        )
    if (narrowed := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise UsageError(
            f"{label} is {name}, which JAX would narrow to {narrowed.name}",
            hint='jax.config.update("jax_enable_x64", True) at the start of the program; or cast it by a view',
        )


@cache
def _has_arrays_of(name: str) -> bool:
    """Whether JAX has arrays of a dtype, be they narrowed; some it refuses only when it makes one."""
    dtype = numpy_dtype(name)
    try:
        jax.numpy.asarray(np.zeros(2, dtype))
    except (TypeError, RuntimeError):
        return False
    return dtype.name == name  # others are NumPy's integers that stand for a dtype of PyTorch


@dataclass(slots=True)
class _Amount:
    """Bytes that were read from storage, and how many of them were not verified."""

    nbytes: int = 0
    unverified: int = 0


def _read_together(
    ck: Checkpoint, wanted: Sequence[_Wanted], ranks: Group, reading: ReadOptions
) -> tuple[list[Any], _Amount]:
    """Read the arrays of this process; if a process fails, all raise its error."""
    ranks.combine(ck.id, _same_checkpoint, str)
    arrays, amount, failure = list[Any](), _Amount(), None
    try:
        with consistent(), checking_unchanged(ck.store, LOAD_INVALID, TRACKERS):
            for batch in grouped(wanted, lambda w: w.nbytes, _BATCH_BYTES):
                arrays += _read_batch(ck, batch, reading, amount)
    except Exception as error:  # noqa: BLE001 - raised on all processes
        failure = error
    ranks.combine(failure)
    return arrays, amount


def _same_checkpoint(a: str, b: str) -> str:
    if a != b:
        raise Conflict(
            f"one process has opened the checkpoint {a}, and another one {b}",
            hint="load the same checkpoint in all processes, and do not replace it meanwhile",
        )
    return a


def _read_batch(
    ck: Checkpoint, wanted: Sequence[_Wanted], reading: ReadOptions, amount: _Amount
) -> list[Any]:
    """Read arrays to host memory, and put them on their devices."""
    parts: list[np.ndarray[Any, Any]] = []
    labels: list[str] = []
    items, devices = [], []
    for w in wanted:
        boxes = w.boxes
        pieces = []
        for box in boxes:
            pieces.append((len(parts), Piece(box, 0, row_major(box.shape))))
            parts.append(np.empty(box.shape, numpy_dtype(w.stored.dtype)))
            labels.append(str(w.stored.key))
        devices.append(list(boxes.values()))
        items.append(item_for(ck.source, w.stored, [(n, p) for n, p in pieces if p.box.size]))
    memories = [part.reshape(-1).view(np.uint8) for part in parts]
    plan = read_items(ck.store, [i for i in items if i.pieces], memories, labels, reading)
    amount.nbytes += plan.bytes_read
    amount.unverified += plan.bytes_unverified
    remaining = iter(parts)
    arrays = [_array(w, on, remaining) for w, on in zip(wanted, devices, strict=True)]
    return jax.block_until_ready(arrays)  # type: ignore[no-any-return]


def _array(w: _Wanted, devices: Sequence[Sequence[Any]], parts: Iterator[Any]) -> Any:
    """The array of a stored tensor, from the next parts that were read."""
    if w.sharding is None:
        return next(parts)
    on_devices = []
    for of_part, part in zip(devices, parts, strict=False):  # takes no more parts than these
        on_devices += [jax.device_put(part, device) for device in of_part]
    array = jax.make_array_from_single_device_arrays(
        w.stored.shape, w.sharding, on_devices, dtype=numpy_dtype(w.stored.dtype)
    )
    return jax.random.wrap_key_data(array, impl=w.random_keys) if w.random_keys else array
