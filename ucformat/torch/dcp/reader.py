"""`Reader`: `torch.distributed.checkpoint` loads any checkpoint that ucformat can open, including foreign ones."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ucformat.checkpoint import Checkpoint
from ucformat.errors import StateMismatch, UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.plan import check_verify
from ucformat.reading.rank import LOAD_INVALID
from ucformat.reading.readable import TRACKERS
from ucformat.references import open_reference
from ucformat.sources.dcp.metadata import TransformedItems
from ucformat.storage.cache.scope import consistent
from ucformat.storage.watched import check_unchanged
from ucformat.torch.dcp.entries import Entries, StoredWeight, StoredWrapper, fit_values
from ucformat.torch.loading.match import Problems, match, raise_for, stored_names
from ucformat.torch.loading.read import read
from ucformat.torch.state.local import LocalShard, local_of, without_ties
from ucformat.torch.state.memory import dtype_name
from ucformat.torch.state.subclasses import check_live, take_apart

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from ucformat.reading.plan import Verify
    from ucformat.torch.loading.match import Rename

__all__ = ["Reader"]


class Reader(StorageReader):
    """A `StorageReader` of torch.distributed.checkpoint that reads checkpoints of any kind and layout.

        dcp.load(state, storage_reader=Reader(path))

    Replaces `FileSystemReader`. Each rank reads only the boxes that it holds, straight into its tensors. Names of the
    state are found with or without the prefixes under which the program keeps model and optimizer, nested or flattened.
    Hyper-parameters that are not stored keep the program's values. DCP raises for the first entry that is missing or
    has another shape; all other mismatches are raised in one error before a rank reads.

    Args:
        path: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open checkpoint. A
            `checkpoint_id` passed to DCP replaces it.
        _extension_registry: the stream extensions with which `FileSystemWriter` wrote the checkpoint, if they are not
            PyTorch's own. Such a checkpoint needs `trust=True`, since `FileSystemReader` itself reads it.
        rename: maps names of the checkpoint to names of the state: a function, or `{regex: replacement}`, where the
            regex matches the whole name.
        cast: cast tensors to the dtypes of the state, as `FileSystemReader` does; False: another dtype is an error.
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
        self._stock: FileSystemReader | None = None  # reads a checkpoint with stream extensions

    @property
    def checkpoint_id(self) -> str | None:
        """The url of the checkpoint."""
        return self._url.url if isinstance(self._url, Checkpoint) else None if self._url is None else str(self._url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Check whether ucformat can open a checkpoint.

        Args:
            checkpoint_id: its path, URL or reference.
        """
        try:
            open_reference(checkpoint_id)
        except (LookupError, ValueError, OSError):
            return False
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Prepare for another load.

        Args:
            checkpoint_id: replaces the path, unless None.
        """
        if checkpoint_id is not None:
            self._url = checkpoint_id
        self.load_id = uuid4().hex
        self._entries = self._stock = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002 - `kwargs` would mean metadata by rank
        """Open the checkpoint, and return its metadata; entries are resolved when DCP looks them up.

        Args:
            args: ignored.
            options: ignored.

        Raises:
            UsageError: there is no path.
        """
        if self._url is None:
            raise UsageError("the Reader has no path", hint="Reader(path), or give DCP a checkpoint_id")
        try:
            ck = self._url if isinstance(self._url, Checkpoint) else open_reference(self._url)
        except TransformedItems:
            if not self._trust:
                raise
            self._stock = FileSystemReader(str(self._url), self._extensions)
            return self._stock.read_metadata()
        self._entries = Entries(ck, stored_names(ck, self._rename))
        return Metadata(
            state_dict_metadata=cast("Any", self._entries),
            planner_data=_Paths(self._entries),
            storage_meta=StorageMeta(checkpoint_id=ck.url, save_id=ck.id or None, load_id=self.load_id),
            version=CURRENT_DCP_VERSION,
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Do nothing, since the checkpoint is open, except for a checkpoint with stream extensions.

        Args:
            metadata: from `read_metadata`.
            is_coordinator: whether this rank coordinates the load.
            args: as DCP passes them.
            kwargs: as DCP passes them.
        """
        if not isinstance(metadata.state_dict_metadata, Entries):
            self._stock = self._stock or FileSystemReader(str(self._url), self._extensions)
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged.

        Args:
            plan: of this rank.
        """
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Args:
            plans: of all ranks.
        """
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan.

        Args:
            plan: of this rank.
            planner: of DCP, whose tensors are filled.

        Raises:
            StateMismatch: dtypes or values do not fit; the message lists all mismatches, and this rank has not read.
            ChecksumError: a chunk does not match its checksum.
            Conflict: a file of the checkpoint has changed since it was opened.
            UsageError: `read_metadata` was not called.
        """
        if self._stock is not None:
            return self._stock.read_data(plan, planner)
        entries = self._entries
        if entries is None:
            raise UsageError("the checkpoint is not open", hint="call read_metadata() before read_data()")
        items = [i for i in plan.items if i.type != LoadItemType.BYTE_IO]
        wrapped = [isinstance(entries.find(i.storage_index.fqn), StoredWrapper) for i in items]
        wanted = [
            (i, _live(planner, i) if w else planner.resolve_tensor(i)) for i, w in zip(items, wrapped, strict=True)
        ]
        plain = [_target(entries, i, t.detach()) for (i, t), w in zip(wanted, wrapped, strict=True) if not w]
        inner, wrapper_problems = _wrapper_targets(entries, compress(wanted, wrapped))
        aliases, targets = without_ties([*plain, *inner])
        matched, tensor_problems, _ = match(targets, aliases, entries.ck, entries.names, cast=self._cast)
        held = getattr(planner, "state_dict", {})
        current = {k: None if isinstance(v, BytesStorageMetadata) else v for k, v in held.items()}
        fqns = [i.dest_index.fqn for i in plan.items if i.type == LoadItemType.BYTE_IO]
        values, value_problems = fit_values(entries, fqns, current, trust=self._trust, cast=self._cast)
        _raise_for(
            wrapper_problems | tensor_problems | value_problems,
            entries.ck.url,
            partial=getattr(planner, "allow_partial_load", False),
        )
        with consistent():
            self.nbytes, self.bytes_unverified = read(entries.ck, matched, self._verify, self._threads)
            check_unchanged(entries.ck.store, LOAD_INVALID, TRACKERS)
        for item, tensor in wanted:
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
    found = entries.find(item.storage_index.fqn)
    assert isinstance(found, StoredWeight)  # noqa: S101 - it was planned as a tensor
    shape = entries.shape(found.key)
    assert shape is not None  # noqa: S101
    info = TensorInfo(found.key.name, found.key.state, dtype_name(tensor.dtype), shape)
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    strides = tuple(tensor.stride()) if tensor.device.type == "cpu" else row_major(tuple(tensor.shape))
    return LocalShard(info, (Piece(box, 0, strides),) if box.size else (), tensor)


def _live(planner: LoadPlanner, item: ReadItem) -> torch.Tensor:
    """The program's own tensor for an item: a planner may give a part of it, or a detached one."""
    fqn = item.dest_index.fqn
    state = getattr(planner, "state_dict", {})
    return state[fqn] if fqn in state else planner.resolve_tensor(item)


def _wrapper_targets(
    entries: Entries, wrappers: Iterable[tuple[ReadItem, torch.Tensor]]
) -> tuple[list[LocalShard], Problems]:
    """The targets of wrappers: what is inside; and those of which the checkpoint has something else."""
    out: list[LocalShard] = []
    others: list[str] = []
    for item, tensor in wrappers:
        fqn = item.storage_index.fqn
        taken = take_apart(fqn, tensor)
        if taken is None:
            others.append(f"{fqn} is a plain tensor, in the checkpoint it is a wrapper")
            continue
        check_live(fqn, tensor, taken)
        keys = {n: entries.recorded.tensors.get(".".join((fqn, *n)), Key(fqn, "")) for n in taken.tensors}
        wrong = entries.recorded.other_wrapper((fqn,), keys, taken)
        if wrong is not None:
            others.append(f"{fqn} {wrong}")
            continue
        out += [replace(local_of(*keys[names], inner), wrapper=fqn) for names, inner in taken.tensors.items()]
    return out, Problems(others=tuple(others))


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
