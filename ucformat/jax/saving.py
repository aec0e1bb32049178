"""`save` and `async_save`: all processes write one universal checkpoint, by the writer that other engines use, too."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import numpy as np

from ucformat.errors import UsageError, check_keywords, refuse_arguments
from ucformat.jax.ranks import processes_for_call
from ucformat.jax.shards import begin_copy, mesh_axes, parts_of
from ucformat.jax.trees import infos_of, leaves_of, random_keys_of
from ucformat.reading.dtypes import dtype_name
from ucformat.reading.readable import path_to_json
from ucformat.reading.stand_ins import NdArray
from ucformat.reading.trees import JAX
from ucformat.reading.values import to_json
from ucformat.storage.url import path_text
from ucformat.torch.comm.group import TIMEOUT
from ucformat.torch.saving.handles import SaveHandle, set_outcome, wait_until_done
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.options import SaveArguments, SaveOptions
from ucformat.torch.saving.save import Saved, assets_in, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from ucformat.geometry.distribution import Distribution
    from ucformat.jax.trees import Leaf
    from ucformat.torch.state.elements import Memory

__all__ = ["async_save", "save"]


#: Arguments of `ucformat.torch.save` that JAX programs need not, or cannot, give.
_REFUSED = {
    "group": "all processes of the program save together",
    "names": "each process has all arrays of the tree under their names in the whole model",
    "changed": "leave it out: patches are then made by comparing all rows with the base",
    "verify_changed": "it goes with `changed`",
    "partial": "leave it out: everything is saved; base=True writes nothing of what is equal",
    "tokens": "it goes with `partial`",
    "log_to": "call `ucformat.log_reference` on one process when the checkpoint is committed",
    "certify": "leave it out: nothing can change the values of arrays during a save",
}


class _Collected(NamedTuple):
    """All that this process saves: what it states of it, and the memory of its tensors."""

    info: StateInfo
    memories: Sequence[Memory]
    options: SaveOptions
    metadata: SaveMetadata


def save(state: Any, url: str | PathLike[str], **arguments: Unpack[SaveArguments]) -> Saved:
    """Save a tree of arrays as one checkpoint; all processes call this together.

    Blocks until the checkpoint is committed, and durable. Each process writes what its devices
    hold, and what several of them hold is written once.

    Args:
        state: a tree of arrays of JAX or NumPy, numbers, text and None; the same on all processes.
        url: where to write the checkpoint, a path or URL; the same on all processes.
        arguments: those of `ucformat.torch.save`, by keyword, except `group`, `names`, `changed`,
            `verify_changed` and `certify`.

    Raises:
        Conflict: a checkpoint exists at `url`.
        UsageError: a leaf cannot be saved, or an argument or a replica differs between processes.
        UcformatError: a process failed or died; nothing is committed. Every process gets the same
            error.
    """
    _check_arguments("save", arguments)
    with processes_for_call("save", url, arguments.get("timeout", TIMEOUT)) as ranks:
        with ranks.sharing_errors():
            collected = _collect(state, url, arguments)
        return write_checkpoint(*collected, ranks)


_writing = ThreadPoolExecutor(1, "ucformat-async")  # saves begin in the same order on all processes
_in_flight: list[SaveHandle] = []


def async_save(
    state: Any, url: str | PathLike[str], **arguments: Unpack[SaveArguments]
) -> SaveHandle:
    """Save a tree of arrays in the background; all processes call this together.

    Returns when the arrays are copied to host memory, so that they may be donated. A thread writes
    the checkpoint, and commits it. The next call waits until it has ended.

    Args:
        state: as for `save`.
        url: as for `save`.
        arguments: as for `save`.

    Returns:
        a handle, whose `wait` returns when the checkpoint is committed.

    Raises:
        UsageError: a leaf cannot be saved, or an argument is invalid.
        UcformatError: an earlier `async_save` failed, and its error was not retrieved from the
            handle on some process. Every process gets the same error.
    """
    begun = time.monotonic()
    _check_arguments("async_save", arguments)
    timeout = arguments.get("timeout", TIMEOUT)
    with processes_for_call("async_save", url, timeout) as ranks:
        with ranks.sharing_errors():
            _wait_for_earlier()
            collected = _collect(state, url, arguments, copy=True)
        ranks.combine(None)  # what others could not collect is raised here
    handle = SaveHandle(path_text(url), time.monotonic() - begun)

    def write() -> None:
        try:
            with processes_for_call("async_save", url, timeout) as ranks:
                set_outcome(handle, write_checkpoint(*collected, ranks))
        except BaseException as error:  # noqa: BLE001 - the handle raises it
            set_outcome(handle, error)

    _in_flight.append(handle)
    _writing.submit(write)
    return handle


def _wait_for_earlier() -> None:
    """Wait until the saves in the background have ended; raises the error of one that was not retrieved."""
    while _in_flight:
        earlier = _in_flight.pop()
        wait_until_done(earlier)
        retrieved, error = earlier.retrieved, earlier.error()
        if error is not None and not retrieved:
            raise error


def _check_arguments(call: str, arguments: SaveArguments) -> None:
    check_keywords(call, arguments, SaveArguments)
    refuse_arguments(f"ucformat.jax.{call}", arguments, _REFUSED)


def _collect(
    state: Any, url: str | PathLike[str], arguments: SaveArguments, *, copy: bool = False
) -> _Collected:
    """Collect what this process saves.

    Args:
        copy: as in `parts_of`.
    """
    options = SaveOptions.of(path_text(url), arguments)
    leaves, _ = leaves_of(state)
    arrays = [leaf for leaf in leaves if leaf.is_array]
    for leaf in arrays:
        _check_values(leaf)
    infos = infos_of(arrays)
    values = [jax.random.key_data(a.value) if a.is_random_key else a.value for a in arrays]
    for value in values:  # all are on the way to the host before one is waited for
        begin_copy(value)
    parts = [parts_of(value, copy=copy) for value in values]
    numbers: dict[Distribution | None, int] = {None: -1}
    for part in parts:
        numbers.setdefault(part.distribution, len(numbers) - 1)
    shardings = [value.sharding for value in values if isinstance(value, jax.Array)]
    info = StateInfo(
        tensors=tuple((info, part.pieces) for info, part in zip(infos, parts, strict=True)),
        objects=_objects(leaves),
        ranks={},
        groups=(),
        aliases={},
        layout=mesh_axes(shardings),
        engine={"name": JAX, "version": jax.__version__},
        paths={info.key: (leaf.path,) for info, leaf in zip(infos, arrays, strict=True)},
        distributions=tuple(d for d in numbers if d is not None),
        distributed=tuple(numbers[part.distribution] for part in parts),
    )
    folder = arguments.get("assets")
    assets = assets_in(folder) if folder is not None and not jax.process_index() else {}
    metadata = SaveMetadata.of(arguments, assets)
    return _Collected(info, [part.memory for part in parts], options, metadata)


def _check_values(leaf: Leaf) -> None:
    """Check that an array has values."""
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise UsageError(
            f"{leaf.name} only describes an array, and has no values", hint="save the array itself"
        )
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        raise UsageError(
            f"{leaf.name} has been deleted: its memory was donated to a function, or freed",
            hint="save what that function returned, or save before the call",
        )


def _objects(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """The values of a tree by name, and what it has besides."""
    plain = [leaf for leaf in leaves if not leaf.is_array]
    objects = {leaf.name: _json(leaf) for leaf in plain if not leaf.empty}
    if JAX in objects:
        raise UsageError(
            f"the value {JAX} at the root of the tree has the name of what is noted of the tree",
            hint="give it another key",
        )
    noted: dict[str, Any] = {}
    if plain:
        noted["leaves"] = [[path_to_json(leaf.path), leaf.empty or _kind(leaf)] for leaf in plain]
    arrays = (leaf for leaf in leaves if leaf.is_array)
    keys = {leaf.name: random_keys_of(leaf).impl for leaf in arrays if leaf.is_random_key}
    if keys:
        noted["random_keys"] = keys
    return {**objects, **({JAX: noted} if noted else {})}


def _kind(leaf: Leaf) -> str:
    return "string" if isinstance(leaf.value, str) else "scalar"


def _json(leaf: Leaf) -> Any:
    value = leaf.value
    if isinstance(value, np.generic):
        value = NdArray(dtype_name(value.dtype), (), value.tobytes(), fortran=False)
    return to_json(value, path=leaf.name)
