"""`Reader`: `torch.distributed.checkpoint` loads any checkpoint that ucformat can open."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ucformat.checkpoint import Checkpoint
from ucformat.engines.pytorch.dcp_streams import open_transformed
from ucformat.errors import (
    PermissionDenied,
    StateMismatch,
    UnsupportedError,
    UsageError,
    first_names,
)
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.execute import ReadOptions
from ucformat.reading.plan import check_verify
from ucformat.reading.rank import LOAD_INVALID
from ucformat.reading.readable import TRACKERS, IntKey
from ucformat.reading.state_names import GROUPS, dotted, key_of_dotted
from ucformat.reading.values import from_json
from ucformat.references import open_reference
from ucformat.sources.distcp.metadata import TransformedItems
from ucformat.storage.cache.scope import consistent
from ucformat.storage.wrappers import checking_unchanged
from ucformat.torch.loading.match import Problems, match, raise_for, stored_names
from ucformat.torch.loading.read import read
from ucformat.torch.loading.values import ABSENT, SavedState, value_at
from ucformat.torch.state.groups import are_names, is_group
from ucformat.torch.state.local import LocalShard, local_of, without_ties
from ucformat.torch.state.memory import dtype_name, torch_dtype
from ucformat.torch.state.objects import decode, tensor_of, unfit
from ucformat.torch.state.subclasses import RECORD, check_live, take_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from ucformat.reading.plan import Verify
    from ucformat.reading.readable import StatePath as Path
    from ucformat.schema.manifest import GroupDoc
    from ucformat.torch.loading.match import Rename


__all__ = ["Reader"]


class Reader(StorageReader):
    """A `StorageReader` of torch.distributed.checkpoint that reads checkpoints of any kind and layout.

        dcp.load(state, storage_reader=Reader(path))

    Replaces `FileSystemReader`. Each rank reads only the boxes that it holds, straight into its
    tensors. Names of the state are found with or without the prefixes under which the program keeps
    model and optimizer, nested or flattened. Hyper-parameters that are not stored keep the
    program's values. DCP raises for the first entry that is missing or has another shape; all other
    mismatches are raised in one error before a rank reads.

    Args:
        path: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint. A `checkpoint_id` passed to DCP replaces it.
        _extension_registry: the stream extensions with which `FileSystemWriter` wrote the
            checkpoint, if they are not PyTorch's own.
        rename: maps names of the checkpoint to names of the state: a function, or `{regex:
            replacement}`, where the regex matches the whole name.
        cast: cast tensors to the dtypes of the state, as `FileSystemReader` does; False: another
            dtype is an error.
        trust: unpickle opaque objects, which may run code.
        verify: which checksums to check, as for `ucformat.torch.load`.
        threads: how many threads read on this rank (default: as many as the storage can use).
    """

    def __init__(
        self,
        path: str | PathLike[str] | Checkpoint | None = None,
        _extension_registry: Any = None,
        *,
        rename: Rename | None = None,
        cast: bool = True,
        trust: bool = False,
        verify: Verify = "whole",
        threads: int | None = None,
    ) -> None:
        self.load_id = uuid4().hex  #: another one after each `reset`, as that of FileSystemReader
        self.nbytes = 0  #: bytes that this rank read from storage in the last load
        self.bytes_unverified = 0  #: those of tensors whose checksums were not checked
        self._url = path
        self._rename, self._cast, self._trust, self._threads = rename, cast, trust, threads
        self._verify = check_verify(verify)
        self._entries: Entries | None = None
        self._extensions = _extension_registry

    @property
    def checkpoint_id(self) -> str | None:
        """The url of the checkpoint."""
        if isinstance(self._url, Checkpoint):
            return self._url.url
        return None if self._url is None else str(self._url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Check whether ucformat can open a checkpoint."""
        try:
            open_reference(checkpoint_id)
        except (LookupError, ValueError, OSError):
            return False
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Prepare for another load."""
        if checkpoint_id is not None:
            self._url = checkpoint_id
        self.load_id = uuid4().hex
        self._entries = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002 - `kwargs` would mean metadata by rank
        """Open the checkpoint, and return its metadata; entries are resolved when DCP looks them up.

        Raises:
            UsageError: there is no path.
        """
        if self._url is None:
            raise UsageError(
                "the Reader has no path", hint="Reader(path), or give DCP a checkpoint_id"
            )
        try:
            ck = self._url if isinstance(self._url, Checkpoint) else open_reference(self._url)
        except TransformedItems:
            ck = open_transformed(cast("Any", self._url), self._extensions)
        self._entries = Entries(ck, stored_names(ck, self._rename))
        return Metadata(
            state_dict_metadata=cast("Any", self._entries),
            planner_data=_Paths(self._entries),
            storage_meta=StorageMeta(ck.url, ck.id or None, self.load_id),
            version=CURRENT_DCP_VERSION,
        )

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan.

        Raises:
            StateMismatch: dtypes or values do not fit; the message lists all mismatches, and this
                rank has not read.
            ChecksumError: a chunk does not match its checksum.
            Conflict: a file of the checkpoint has changed since it was opened.
            UsageError: `read_metadata` was not called.
        """
        entries = self._entries
        if entries is None:
            raise UsageError(
                "the checkpoint is not open", hint="call read_metadata() before read_data()"
            )
        items = [i for i in plan.items if i.type != LoadItemType.BYTE_IO]
        wrapped = [isinstance(entries.find(i.storage_index.fqn), StoredWrapper) for i in items]
        requested = [
            (i, _live(planner, i) if w else planner.resolve_tensor(i))
            for i, w in zip(items, wrapped, strict=True)
        ]
        unwrapped = compress(requested, (not w for w in wrapped))
        plain = [_target(entries, i, t.detach()) for i, t in unwrapped]
        inner, wrapper_problems = _wrapper_targets(entries, compress(requested, wrapped))
        aliases, targets = without_ties([*plain, *inner])
        matched, tensor_problems, _ = match(
            targets, aliases, entries.ck, entries.names, cast=self._cast
        )
        state = getattr(planner, "state_dict", {})
        current = {k: None if isinstance(v, BytesStorageMetadata) else v for k, v in state.items()}
        fqns = [i.dest_index.fqn for i in plan.items if i.type == LoadItemType.BYTE_IO]
        values, value_problems = fit_values(
            entries, fqns, current, trust=self._trust, cast=self._cast
        )
        problems = wrapper_problems | tensor_problems | value_problems
        partial = getattr(planner, "allow_partial_load", False)
        _raise_for(problems, entries.ck.url, partial=partial)
        with consistent(), checking_unchanged(entries.ck.store, LOAD_INVALID, TRACKERS):
            options = ReadOptions(self._verify, threads=self._threads)
            self.nbytes, self.bytes_unverified = read(entries.ck, matched, options)
        for item, tensor in requested:
            planner.commit_tensor(item, tensor)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO and item.dest_index.fqn in values:
                planner.load_bytes(item, _saved(values[item.dest_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _Paths(Mapping[str, tuple[str | int, ...]]):
    """The path of each entry in a state that contains all of them, computed on first use."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __getitem__(self, fqn: str) -> tuple[str | int, ...]:
        return self._entries.paths[fqn]

    def __iter__(self) -> Any:
        return iter(self._entries.paths)

    def __len__(self) -> int:
        return len(self._entries.paths)


def _target(entries: Entries, item: ReadItem, tensor: torch.Tensor) -> LocalShard:
    """The target of a read item, as a piece of the stored tensor."""
    entry = entries.find(item.storage_index.fqn)
    assert isinstance(entry, StoredWeight)  # noqa: S101 - it was planned as a tensor
    shape = entries.shape(entry.key)
    assert shape is not None  # noqa: S101
    info = TensorInfo(*entry.key, dtype_name(tensor.dtype), shape)
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    on_host = tensor.device.type == "cpu"
    strides = tuple(tensor.stride()) if on_host else row_major(tuple(tensor.shape))
    return LocalShard(info, (Piece(box, 0, strides),) if box.size else (), tensor)


def _live(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """The program's own tensor for an item: a planner may give a part of it, or a detached one."""
    fqn = item.dest_index.fqn
    state = getattr(planner, "state_dict", {})
    return state[fqn] if fqn in state else planner.resolve_tensor(item)


def _wrapper_targets(
    entries: Entries, wrappers: Iterable[tuple[ReadItem, torch.Tensor]]
) -> tuple[list[LocalShard], Problems]:
    """The targets inside wrappers; and wrappers that the checkpoint lacks."""
    out: list[LocalShard] = []
    problems: list[str] = []
    for item, tensor in wrappers:
        fqn = item.storage_index.fqn
        parts = take_apart(fqn, tensor)
        if parts is None:
            problems.append(f"{fqn} is a plain tensor, in the checkpoint it is a wrapper")
            continue
        check_live(fqn, tensor, parts)
        recorded = entries.recorded.tensors
        keys = {n: recorded.get(".".join((fqn, *n)), Key(fqn, "")) for n in parts.tensors}
        wrong = entries.recorded.other_wrapper((fqn,), keys, parts)
        if wrong is not None:
            problems.append(f"{fqn} {wrong}")
            continue
        locals_ = ((local_of(*keys[names], inner)) for names, inner in parts.tensors.items())
        out += [replace(local, wrapper=fqn) for local in locals_]
    return out, Problems(others=tuple(problems))


def _saved(value: Any) -> io.BytesIO:
    """A value in the form that DCP's planner loads."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def _raise_for(problems: Problems, url: str, *, partial: bool) -> None:
    """StateMismatch with all problems of this rank; with `partial`, missing entries are ignored."""
    hints = ["ucformat.torch.load(state, url) reports the mismatches of all ranks at once"]
    if problems.dtypes:
        hints.insert(0, "Reader(path) casts, if cast=False is left out")
    try:
        raise_for(replace(problems, missing=()) if partial else problems, "report", url)
    except StateMismatch as error:
        raise StateMismatch(error.message, hint="; ".join(hints)) from None


# A checkpoint as PyTorch DCP sees it: resolves the entries of a program's state dict, and fits
# their values.


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor in one state, under the program's name; `weight` may be stored as `master`."""

    key: Key


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A plain value in its JSON form."""

    data: Any


@dataclass(frozen=True, slots=True)
class SplitValue:
    """A value, such as a tuple, whose tensors were stored separately."""


@dataclass(frozen=True, slots=True)
class StoredWrapper:
    """A wrapper subclass, whose inner tensors are stored."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A hyper-parameter of an optimizer group, or without `name` all groups of the optimizer at `root`.

    `which` is the number of the group, or the name of a parameter in it.
    """

    root: str
    which: int | str = 0
    name: str = ""


Entry = StoredWeight | StoredWrapper | PlainValue | SplitValue | Hyperparameter


class Entries(Mapping[str, Any]):
    """The entries of a checkpoint, by the dotted paths of any program's state dict.

    Paths of the state that was saved, if the checkpoint records them, have precedence. Other
    weights are found with or without the prefix under which the program keeps its model (`model.`,
    `app.model.`), optimizer states below any `….state.`, hyper-parameters below any
    `….param_groups.`, nested or flattened, and plain values by their paths. Iteration lists each
    entry once: as it was saved, or if that is not recorded as in a state `{"model": …, "optim": …,
    …}`.
    """

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.recorded = SavedState(ck, names)
        self.states = {name: tuple(ck.states(stored)) for name, stored in names.items()}
        self._found: dict[str, Entry | None] = {}

    def find(self, fqn: str) -> Entry | None:
        """Resolve an entry."""
        if fqn not in self._found:
            self._found[fqn] = self._find(fqn)
        return self._found[fqn]

    def _find(self, fqn: str) -> Entry | None:
        if fqn in self.recorded.tensors:
            return StoredWeight(self.recorded.tensors[fqn])
        option = self._option(fqn)
        if option is not None and option.root in self.recorded.optimizers:
            group_of = self.recorded.find_group(option.root)
            return option if isinstance(option.which, int) or group_of(option.which) else None
        record = value_at(self.ck.objects, f"{fqn}.{RECORD}")
        if isinstance(record, dict):
            return StoredWrapper(from_json(record))
        data = value_at(self.ck.objects, fqn)
        has_tensors = self.recorded.holds_tensors(fqn)
        if data is not ABSENT and self.recorded.tensors and not has_tensors:
            return PlainValue(data)
        key = key_of_dotted(fqn, self.states)
        if key is not None and self.shape(key) is not None and not self._is_elsewhere(fqn, key):
            return StoredWeight(key)
        if isinstance(data, dict) and set(data) == {"$ref"}:
            return self._find(data["$ref"])
        if has_tensors:
            return SplitValue()
        return PlainValue(data) if data is not ABSENT else option

    def _is_elsewhere(self, fqn: str, key: Key) -> bool:
        """Whether a tensor of this name was saved in another entry than the existing one asked for."""
        stored = self.names[key.name]
        asked_by_name = key.name == fqn or self.recorded.unrenamed.get(key.name) != stored
        recorded = self.ck.metadata.paths.get(Key(stored, key.state))
        if asked_by_name or key.state != "weight" or not recorded:
            return False
        return fqn.partition(".")[0] in self._entries

    @cached_property
    def _entries(self) -> set[str]:
        """The keys of the saved state below which tensors were saved."""
        return {text.partition(".")[0] for text in self.recorded.tensors if "." in text}

    def _option(self, fqn: str) -> Hyperparameter | None:
        if not self.ck.manifest.groups:
            return None
        start = 0 if fqn.startswith(GROUPS) else fqn.find("." + GROUPS) + 1
        root, below = fqn[:start].rstrip("."), fqn[start:]
        if below == GROUPS:
            return Hyperparameter(root)
        if not below.startswith(GROUPS + "."):
            return None
        number, _, name = below[len(GROUPS) + 1 :].partition(".")
        param, _, last = below[len(GROUPS) + 1 :].rpartition(".")
        places = (place for _, place in self.recorded.optimizers.get(root, ()))
        is_parameter = any(place.flattened and param in place.names for place in places)
        if number.isdecimal() and name and not is_parameter:
            return Hyperparameter(root, int(number), name)
        return Hyperparameter(root, param, last) if param and last else None

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if it is not stored."""
        states = ("weight", "master") if key.state == "weight" else (key.state,)
        stored = (self.ck.tensors.get(Key(self.names[key.name], s)) for s in states)
        return next((info.shape for info in stored if info is not None), None)

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        entry = self.find(fqn)
        if entry is None:
            raise KeyError(fqn)
        if isinstance(entry, StoredWrapper):
            return _metadata(entry.record["shape"], getattr(torch, entry.record["dtype"]))
        return (
            self._tensor(entry.key) if isinstance(entry, StoredWeight) else BytesStorageMetadata()
        )

    def _tensor(self, key: Key) -> TensorStorageMetadata:
        """The metadata of a tensor as one chunk, of which DCP requests the box that a rank holds."""
        stored, shape = self.names[key.name], torch.Size(self.shape(key) or ())
        only_master = key.state == "weight" and "weight" not in self.states[key.name]
        state = "master" if only_master else key.state
        return _metadata(shape, torch_dtype(self.ck.tensors[Key(stored, state)].dtype))

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """The path of each entry in a state that contains all of them."""
        out = {
            dotted(p): tuple(str(x) if isinstance(x, IntKey) else x for x in p)
            for p in self.recorded.entries()
        }
        recorded = set(self.recorded.tensors.values())

        def add(*path: str | int) -> None:
            out.setdefault(dotted(path), path)

        listed: set[str] = set()
        for name, stored in self.names.items():
            for state in self.states[name]:
                if Key(stored, state) in recorded or (stored in listed and state not in _PARAMETER):
                    continue  # tied names have no optimizer states of their own
                if state in _PARAMETER:
                    add("model", name)
                else:
                    add("optim", "state", name, state)
            listed.add(stored)
        if not recorded and not self.recorded.optimizers:
            for i, group in enumerate(self.ck.manifest.groups):
                for option in ("params", *group.options):
                    add("optim", GROUPS, i, option)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


_PARAMETER = ("weight", "master")


def _metadata(shape: Sequence[int], dtype: torch.dtype) -> TensorStorageMetadata:
    """The metadata of a tensor that is stored as one chunk."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


_log = logging.getLogger("ucformat")
_MAX_NAMES = 10


def fit_values(
    entries: Entries, fqns: Sequence[str], current: Mapping[str, Any], *, trust: bool, cast: bool
) -> tuple[dict[str, Any], Problems]:
    """Fit the values of entries other than tensors.

    Args:
        current: the values of the program, which determine types that JSON does not record.

    Returns:
        the new values by dotted path, and what does not fit.
    """
    values: dict[str, Any] = {}
    options: dict[str, Hyperparameter] = {}
    problem_texts: list[str] = []
    dtypes: list[str] = []
    for fqn in fqns:
        entry = entries.find(fqn)
        if isinstance(entry, Hyperparameter):
            options[fqn] = entry
        elif isinstance(entry, PlainValue):
            try:
                value = decode(entry.data, current.get(fqn), trust=trust)
            except (PermissionDenied, UnsupportedError) as error:
                problem_texts.append(f"the object {fqn}: {error.message}")
                continue
            wrong, dtype = unfit(value, current.get(fqn), cast=cast)
            problem_texts += [f"the object {fqn}: {w}" for w in wrong]
            dtypes += [f"the object {fqn} is {d}" for d in dtype]
            values[fqn] = value
        elif isinstance(entry, SplitValue):
            try:
                values[fqn] = _joined(entries, fqn, current.get(fqn), trust=trust)
            except (PermissionDenied, UnsupportedError) as error:
                problem_texts.append(f"the object {fqn}: {error.message}")
    problems = Problems(dtypes=tuple(dtypes), others=tuple(problem_texts))
    by_name, option_problems = _fit_options(entries, options, current, trust=trust)
    return values | by_name, problems | Problems(others=tuple(option_problems))


def _joined(entries: Entries, fqn: str, current: Any, *, trust: bool) -> Any:
    """The value of an entry, such as a tuple, whose tensors were stored separately."""

    def inner(key: Any, value: Any) -> Any:
        return _joined(entries, f"{fqn}.{key}", value, trust=trust)

    entry = entries.find(fqn)
    if isinstance(entry, StoredWeight):
        stored = entries.names[entry.key.name]
        return tensor_of(entries.ck[stored, entry.key.state][...])
    if isinstance(current, dict):
        return {k: inner(k, v) for k, v in current.items()}
    if isinstance(current, list | tuple):
        items = [inner(i, v) for i, v in enumerate(current)]
        return type(current)(*items) if hasattr(current, "_fields") else type(current)(items)
    if isinstance(entry, PlainValue):
        return decode(entry.data, current, trust=trust)
    raise UnsupportedError(
        f"its tensors were stored separately, and {fqn} is not one of them",
        hint="use a state of the same structure",
    )


def _fit_options(
    entries: Entries,
    options: Mapping[str, Hyperparameter],
    current: Mapping[str, Any],
    *,
    trust: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The values of hyper-parameters, and what does not fit.

    A group of the program gets the hyper-parameters of its parameters, or if these have no names,
    those of the group with its number. A hyper-parameter that is not stored keeps the program's
    value, which is logged.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    not_stored: dict[str, None] = {}
    finders: dict[str, Callable[[str], GroupDoc | None]] = {}
    for fqn, option in options.items():
        group_of = finders.setdefault(option.root, entries.recorded.find_group(option.root))
        if not option.name:
            values[fqn] = _whole(
                entries, option, current.get(fqn), group_of, not_stored, trust=trust
            )
            continue
        params = _params(entries, option, current)
        if option.name == "params":
            mine = current.get(fqn)
            values[fqn] = mine if are_names(mine) and mine else list(params)
            continue
        values_of = [_option(group_of(p), option.name) for p in params]
        stored = [f for f in values_of if f is not ABSENT]
        if any(f != stored[0] for f in stored[1:]):
            problems.append(f"{fqn}: its parameters were in groups with different values")
        elif stored:
            values[fqn] = _like_number(
                decode(stored[0], current.get(fqn), trust=trust), current.get(fqn)
            )
        else:
            values[fqn] = current.get(fqn)
        not_stored |= {
            f"{p}: {option.name}": None
            for p, f in zip(params, values_of, strict=True)
            if f is ABSENT
        }
    if not_stored:
        _log.warning(
            "%s lacks some hyper-parameters, which keep the values of the program: %s",
            entries.ck.url,
            first_names(not_stored, _MAX_NAMES),
        )
    return values, problems


def _whole(
    entries: Entries,
    option: Hyperparameter,
    current: Any,
    group_of: Callable[[str], GroupDoc | None],
    not_stored: dict[str, None],
    *,
    trust: bool,
) -> list[dict[str, Any]]:
    """All groups of an optimizer as one value."""
    if not isinstance(current, list) or not current or not all(map(is_group, current)):
        return [
            {
                "params": list(names),
                **{k: decode(v, trust=trust) for k, v in group.options.items() if k != "state"},
            }
            for group, names in _groups(entries, option.root)
        ]
    out = []
    for live_group in current:
        group = dict(live_group)
        for key in live_group.keys() - {"params", "param_names"}:
            stored = [
                f for p in live_group["params"] if (f := _option(group_of(p), key)) is not ABSENT
            ]
            if stored and all(f == stored[0] for f in stored):
                group[key] = _like_number(
                    decode(stored[0], live_group[key], trust=trust), live_group[key]
                )
            else:
                not_stored[f"{option.root}: {key}"] = None
        out.append(group)
    return out


def _option(group: GroupDoc | None, name: str) -> Any:
    return ABSENT if group is None else value_at(group.options, name)


def _like_number(value: Any, current: Any) -> Any:
    """A number as a tensor, or a tensor as a number, as the program has it (a learning rate)."""
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor) and isinstance(current, int | float):
        return value.item()
    return value


def _params(
    entries: Entries, option: Hyperparameter, current: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of a group's parameters in the program, or if it has none in the checkpoint."""
    if isinstance(option.which, str):
        return (option.which,)
    root = f"{option.root}.{GROUPS}" if option.root else GROUPS
    mine = current.get(f"{root}.{option.which}.params")
    if are_names(mine) and mine:
        return tuple(mine)
    stored = _groups(entries, option.root)
    return stored[option.which][1] if option.which < len(stored) else ()


def _groups(entries: Entries, root: str) -> list[tuple[GroupDoc, tuple[str, ...]]]:
    """The stored groups of an optimizer with its parameters' names; all if it is not recorded."""
    mine = entries.recorded.optimizers.get(root)
    if mine is not None:
        return [(group, place.names) for group, place in mine]
    return [(group, group.params) for group in entries.ck.manifest.groups]
