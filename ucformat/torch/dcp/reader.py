"""`Reader`: `torch.distributed.checkpoint` loads any checkpoint that ucformat opens, foreign ones too."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ucformat.checkpoint import Checkpoint
from ucformat.errors import StateMismatch, UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.reading.rank import LOAD_INVALID
from ucformat.reading.readable import TRACKERS
from ucformat.references import open_reference
from ucformat.storage.watched import check_unchanged
from ucformat.torch.dcp.entries import Entries, StoredWeight, fit_values
from ucformat.torch.loading.match import Problems, match, raise_for, stored_names
from ucformat.torch.loading.read import read
from ucformat.torch.state.local import LocalShard, without_ties
from ucformat.torch.state.memory import dtype_name

if TYPE_CHECKING:
    from os import PathLike

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from ucformat.reading.plan import Verify
    from ucformat.torch.loading.match import Rename

__all__ = ["Reader"]


class Reader(StorageReader):
    """From where `dcp.load(state, storage_reader=Reader(url))` reads: a checkpoint of any kind and any layout.

    Each rank reads the boxes that it holds, and nothing else, straight into its tensors. The names of the state are
    understood with or without what the program keeps model and optimizer under, nested or flattened. Hyper-parameters
    that the checkpoint does not have keep the program's values. DCP itself tells of the first entry that is missing or
    of another shape; what else does not fit is found before a rank reads, and told at once.

    Args:
        path: a checkpoint of any kind that `ucformat.open` opens, or a reference to one, or one that is open. A
            `checkpoint_id` given to DCP takes its place.
        _extension_registry: of no effect, as in `FileSystemReader` where a checkpoint was written without extensions;
            one that was written with some is refused.
        rename: makes the state's name of the checkpoint's: a function, or `{regex of the whole name: replacement}`.
        cast: cast tensors to the dtypes of the state.
        trust: open pickled objects, which may run code.
        verify: which checksums to check: of chunks that are read `whole`, `always` (reads whole chunks), `never`.
        threads: how many read on this rank.
    """

    def __init__(
        self,
        path: str | PathLike[str] | Checkpoint | None = None,
        _extension_registry: Any = None,
        *,
        rename: Rename | None = None,
        cast: bool = False,
        trust: bool = False,
        verify: Verify = "whole",
        threads: int | None = None,
    ) -> None:
        self.nbytes = 0  #: bytes that this rank read from storage for the last load
        self.bytes_unverified = 0  #: those of them in tensors for which no checksum was checked
        self._url = path
        self._rename, self._cast, self._trust, self._verify, self._threads = rename, cast, trust, verify, threads
        self._entries: Entries | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The url, as DCP names it."""
        return self._url.url if isinstance(self._url, Checkpoint) else None if self._url is None else str(self._url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether there is a checkpoint that ucformat can open."""
        try:
            open_reference(checkpoint_id)
        except (LookupError, ValueError, OSError):
            return False
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint where one is given."""
        if checkpoint_id is not None:
            self._url = checkpoint_id
        self._entries = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:  # noqa: ARG002 - `kwargs` would mean metadata by rank
        """What the checkpoint holds, made from its manifest; entries are looked up as DCP asks for them."""
        if self._url is None:
            raise UsageError("the Reader has no path", hint="Reader(path), or give DCP a checkpoint_id")
        ck = self._url if isinstance(self._url, Checkpoint) else open_reference(self._url)
        self._entries = Entries(ck, stored_names(ck, self._rename))
        return Metadata(
            state_dict_metadata=cast("Any", self._entries),
            planner_data=_Paths(self._entries),
            storage_meta=StorageMeta(checkpoint_id=ck.url),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Nothing to do: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan lists, together.

        Raises:
            StateMismatch: dtypes or values do not fit; all that do not are listed, and nothing of this rank is changed.
            ChecksumError: a chunk does not match its checksum.
            Conflict: a file of the checkpoint was changed since it was opened.
            UnsafeError: an object is a pickle, and `trust` is false.
        """
        entries = self._entries
        if entries is None:
            raise UsageError("nothing is open", hint="read_metadata() comes before read_data()")
        wanted = [(i, planner.resolve_tensor(i)) for i in plan.items if i.type != LoadItemType.BYTE_IO]
        aliases, targets = without_ties([_target(entries, i, t.detach()) for i, t in wanted])
        matched, tensor_problems = match(targets, aliases, entries.ck, entries.names, cast=self._cast)
        held = getattr(planner, "state_dict", {})
        current = {k: None if isinstance(v, BytesStorageMetadata) else v for k, v in held.items()}
        fqns = [i.dest_index.fqn for i in plan.items if i.type == LoadItemType.BYTE_IO]
        values, value_problems = fit_values(entries, fqns, current, trust=self._trust, cast=self._cast)
        _raise_for(
            tensor_problems | value_problems, entries.ck.url, partial=getattr(planner, "allow_partial_load", False)
        )
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
    """Where each entry lies in a state that holds them all, made when it is asked for."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __getitem__(self, fqn: str) -> tuple[str | int, ...]:
        return self._entries.paths[fqn]

    def __iter__(self) -> Any:
        return iter(self._entries.paths)

    def __len__(self) -> int:
        return len(self._entries.paths)


def _target(entries: Entries, item: ReadItem, tensor: torch.Tensor) -> LocalShard:
    """Where a read item goes, as a piece of the stored tensor."""
    found = entries.find(item.storage_index.fqn)
    assert isinstance(found, StoredWeight)  # noqa: S101 - as a tensor it was planned
    shape = entries.shape(found.key)
    assert shape is not None  # noqa: S101
    info = TensorInfo(found.key.name, found.key.state, dtype_name(tensor.dtype), shape)
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    strides = tuple(tensor.stride()) if tensor.device.type == "cpu" else row_major(tuple(tensor.shape))
    return LocalShard(info, (Piece(box, 0, strides),) if box.size else (), tensor)


def _saved(value: Any) -> io.BytesIO:
    """A value as DCP's planner takes it."""
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def _raise_for(problems: Problems, url: str, *, partial: bool) -> None:
    """StateMismatch with all problems of this rank; with `partial` what is missing is none."""
    hints = ["ucformat.torch.load(state, url) tells of all ranks and tensors together"]
    if problems.dtypes:
        hints.insert(0, "Reader(path, cast=True) casts")
    try:
        raise_for(replace(problems, missing=()) if partial else problems, "report", url)
    except StateMismatch as error:
        raise StateMismatch(error.message, hint="; ".join(hints)) from None
