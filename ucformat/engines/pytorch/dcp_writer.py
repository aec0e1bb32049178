"""`Writer`: `torch.distributed.checkpoint` saves universal checkpoints."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ucformat.engines.pytorch.dcp_streams import check_place, stream_writer
from ucformat.engines.pytorch.source import Dcp
from ucformat.errors import Conflict, LayoutError, UcformatError, UsageError
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.readable import StatePath as Path
from ucformat.reading.stand_ins import opaque_file
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.reading.values import packed
from ucformat.sources.distcp.opened import Leaf, json_of_tree
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_for_call, single_process_group
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import write_checkpoint
from ucformat.torch.state.collect import collect, inner_key, replace_wrappers
from ucformat.torch.state.elements import host_memory
from ucformat.torch.state.local import (
    groups_of,
    local_of,
    mesh_of,
    paths_of,
    places_of,
    records_of,
    tied_names,
)
from ucformat.torch.state.memory import copied_to_host
from ucformat.torch.state.objects import PerRank, encode
from ucformat.torch.state.subclasses import (
    copy_to_host,
    is_subclass,
    memory_of,
    take_apart,
    why_refused,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from ucformat.reading.readable import GroupPlace
    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.save import Saved
    from ucformat.torch.state.elements import Memory
    from ucformat.torch.state.local import LocalShard
    from ucformat.torch.state.subclasses import TakenApart


__all__ = ["Writer"]


class Writer(StorageWriter, BlockingAsyncStager):
    """A `StorageWriter` of torch.distributed.checkpoint that saves universal checkpoints.

        dcp.save(state, storage_writer=Writer(path))

    Replaces `FileSystemWriter`, whose arguments come first, in the same order and with the same
    defaults; also for `dcp.async_save`. The checkpoint is named, planned, written and committed as
    by `ucformat.torch.save`, all or nothing. DCP's planner removes replicas without comparing them.

    Args:
        path: where to write the checkpoint, a path or URL; the same on all ranks. A `checkpoint_id`
            passed to DCP replaces it.
        single_file_per_rank: has no effect; `form` determines the files.
        sync_files: has no effect; a committed checkpoint is always durable.
        thread_count: how many threads of this rank write files of the Zarr form.
        per_thread_copy_ahead: has no effect; all tensors are copied to the host before the first is
            written.
        cache_staged_state_dict: keep the host memory to which `dcp.async_save` copies the state for
            its next call with this writer, which must begin after the first has ended.
        overwrite: replace an existing checkpoint, which stays intact until the new one is
            committed. A checkpoint that is held, tagged, aliased, or needed by others is never
            replaced.
        _extensions: stream extensions, such as a compression or encryption of one's own. What is
            written is then no universal checkpoint, but one of torch.distributed.checkpoint, on a
            local path: a stream cannot be read in part. `Reader` loads it.
        serialization_format: only the default is supported.
        form: `zarr` writes arrays, for which ranks send each other parts of shards; `packed` writes
            one file per rank without communication, which can be opened alike, and which `ucp
            materialize` converts to arrays; `safetensors` is as for `ucformat.torch.save`.
        run: name of the training run, for the catalog.
        metrics: numbers to record in the catalog.
        lineage: the checkpoints that this one was derived from.
        chunk_bytes: the maximum size of a chunk of the Zarr form (default 1 MiB).
        shard_bytes: the maximum size of a shard of the Zarr form (default 128 MiB).
        group: the ranks that save, the same as DCP's `process_group` (default: all).
        timeout: seconds after which an unresponsive rank is considered dead.

    Raises:
        UsageError: an argument is invalid or not supported.
    """

    state_dict_cache: dict[str, Any] | None

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        single_file_per_rank: bool = True,  # noqa: FBT001, FBT002
        sync_files: bool = True,  # noqa: FBT001, FBT002
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,  # noqa: FBT001, FBT002
        overwrite: bool = True,  # noqa: FBT001, FBT002
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        form: Literal["zarr", "packed", "safetensors"] = "zarr",
        step: int | None = None,
        run: str | None = None,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        lineage: Sequence[LineageDoc] = (),
        chunk_bytes: int | None = None,
        shard_bytes: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise UsageError(
                f"the Writer does not support serialization_format {serialization_format}",
                hint=(
                    "leave it out, and export the checkpoint with `ucp export SRC DST --to "
                    "safetensors`"
                ),
            )
        if thread_count < 1:
            raise UsageError(f"thread_count must be at least 1, not {thread_count}")
        self.checkpoint_id = None if path is None else str(path)
        self.metadata = SaveMetadata.of(
            {"step": step, "run": run, "metrics": metrics, "config": config, "lineage": lineage}
        )
        self.saved: Saved | None = None  #: the last committed, in the process that wrote it
        self._options = SaveOptions("", form, overwrite, "equal", chunk_bytes, shard_bytes)
        self._group, self._timeout, self._threads = group, timeout, thread_count
        self._collectives = self._coordinates = True
        self._streams: FileSystemWriter | None = None
        if _extensions:
            options: dict[str, Any] = {
                "step": step,
                "run": run,
                "metrics": metrics,
                "config": config,
                "lineage": lineage,
                "chunk_bytes": chunk_bytes,
                "shard_bytes": shard_bytes,
                "form": form != "zarr",
                "group": group,
            }
            self._streams = stream_writer(
                path,
                _extensions,
                refused=[name for name, value in options.items() if value],
                stock={
                    "single_file_per_rank": single_file_per_rank,
                    "sync_files": sync_files,
                    "thread_count": thread_count,
                    "per_thread_copy_ahead": per_thread_copy_ahead,
                    "overwrite": overwrite,
                },
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state for the process of `dcp.async_save`, where those ranks are the default group."""
        return {**self.__dict__, "_group": None, "saved": None, "state_dict_cache": None}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state to host memory, pinned if there is an accelerator, for `dcp.async_save`.

        Args:
            state_dict: the state. Wrapper subclasses are copied as such; DCP would make plain
                tensors of them.
        """
        original, state_dict = state_dict, _without_wrappers(state_dict)
        cached = not self.cache_staged_state_dict or self.state_dict_cache is not None
        # The base class would pin the memory, for which there must be an accelerator.
        if not cached and not torch.accelerator.is_available():
            self.state_dict_cache = _create_cpu_state_dict(state_dict)
        staged: dict[str, Any] = _with_wrappers(super().stage(state_dict), original)
        return staged

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Check whether ucformat supports a location."""
        try:
            open_store(checkpoint_id)
        except UcformatError:
            return False
        return True

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Prepare for another save."""
        if checkpoint_id is not None:
            self.checkpoint_id = str(checkpoint_id)
        self.saved = None
        if self._streams is not None:
            self._streams.reset(checkpoint_id)

    @property
    def save_id(self) -> str | None:
        """The id of the last committed checkpoint, in the process that wrote it; None before."""
        return None if self.saved is None else self.saved.id

    def storage_meta(self) -> StorageMeta:
        """Return the metadata of the storage, for DCP's planner."""
        if self._streams is not None:
            return self._streams.storage_meta()
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        """Record whether DCP plans with all ranks together.

        Raises:
            UsageError: there is no path.
            Conflict: of stream extensions, a universal checkpoint is there.
        """
        self._collectives = bool(kwargs.get("use_collectives", True))
        self._coordinates = is_coordinator
        if self.checkpoint_id is None:
            raise UsageError(
                "the Writer has no path", hint="Writer(path), or give DCP a checkpoint_id"
            )
        if self._streams is not None:
            check_place(self.checkpoint_id)
            self._streams.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Record all items of this rank, before DCP removes replicas from the plan.

        Raises:
            Conflict: `FileSystemWriter` has written a checkpoint at this location, which is never
                replaced.
        """
        if self._streams is not None:
            return self._streams.prepare_local_plan(plan)
        if self._coordinates and Dcp().find(open_store(str(self.checkpoint_id))):
            raise Conflict(
                f"Checkpoint already exists: {self.checkpoint_id} contains one that "
                "torch.distributed.checkpoint wrote",
                hint=(
                    "choose another location, or remove its files: they would stay beside the "
                    "new checkpoint"
                ),
            )
        return replace(plan, storage_data=local_items(plan)) if plan.usable else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Record how many ranks plan together."""
        if self._streams is not None:
            of_ranks: list[SavePlan] = self._streams.prepare_global_plan(plans)
            return of_ranks
        return [
            replace(p, storage_data=replace(p.storage_data, ranks=len(plans)))
            if isinstance(p.storage_data, LocalItems)
            else p
            for p in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and commit the checkpoint, together with all ranks.

        Returns:
            one result, with the bytes that this rank wrote and the id of the checkpoint.

        Raises:
            Conflict: a checkpoint exists at the location, and `overwrite` is false or it is
                protected.
            UsageError: arguments differ between ranks.
            UcformatError: a rank failed or died; nothing is committed. Every rank gets the same
                error.
        """
        if self._streams is not None:
            return self._streams.write_data(plan, planner)
        local = (
            plan.storage_data if isinstance(plan.storage_data, LocalItems) else local_items(plan)
        )
        with self._ranks(local) as group:
            part: RankItems | None = None
            values: PlainValues | Exception
            try:
                part = collect_items(plan, planner, local)
                values = part.values
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                values = error
            objects = group.gather_scatter(
                values, lambda vs: [join_values(vs), *[{}] * (group.size - 1)], PlainValues, Any
            )
            assert part is not None  # noqa: S101 - `gather_scatter` has raised otherwise
            described = {
                name: getattr(part, name)
                for name in ("tensors", "groups", "aliases", "layout", "paths", "places")
            }
            engine = {"name": "torch", "version": torch.__version__}
            info = StateInfo(objects=objects, ranks={}, engine=engine, **described)
            options = replace(self._options, url=str(self.checkpoint_id))
            try:
                self.saved = write_checkpoint(
                    info, part.memories, options, self.metadata, group, threads=self._threads
                )
            except Conflict as error:
                # with the message of FileSystemWriter, which programs may check
                already = f"Checkpoint already exists and overwrite={options.overwrite}"
                raise Conflict(f"{already}: {error.message}", hint=error.hint) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), self.saved.nbytes, self.saved.id)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all ranks have committed the same checkpoint in `write_data`.

        Raises:
            UcformatError: ranks have committed different checkpoints.
        """
        if self._streams is not None:
            self._streams.finish(metadata, results)
            return
        ids = {r.storage_data for of_rank in results for r in of_rank}
        if len(ids) != 1:
            raise UcformatError(
                f"the ranks wrote {len(ids)} checkpoints", hint="pass the same group on all ranks"
            )

    def _ranks(self, local: LocalItems) -> AbstractContextManager[Group]:
        """The group of the ranks for which DCP has planned."""
        if not (dist.is_available() and dist.is_initialized()):
            return nullcontext(single_process_group())
        size = dist.get_world_size(self._group)
        if self._collectives and local.ranks not in (0, size):
            if local.ranks == 1:  # no_dist=True
                return nullcontext(single_process_group())
            raise UsageError(
                f"DCP saves with {local.ranks} ranks, the Writer with {size}",
                hint="pass the same group to dcp.save(process_group=…) and Writer(group=…)",
            )
        return group_for_call("Writer", self.checkpoint_id, self._group, self._timeout)


def _without_wrappers(state: Any) -> Any:
    """A nested state with None instead of wrapper subclasses."""
    if isinstance(state, dict):
        return {key: _without_wrappers(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        items = [_without_wrappers(value) for value in state]
        unchanged = all(new is old for new, old in zip(items, state, strict=True))
        return state if unchanged else items
    return None if _is_wrapper(state) else state


def _with_wrappers(staged: Any, original: Any) -> Any:
    """A nested state with copies of the wrapper subclasses of another one, which it has not."""
    if isinstance(original, dict):
        return {key: _with_wrappers(staged[key], value) for key, value in original.items()}
    if isinstance(original, list | tuple):
        items = [_with_wrappers(new, old) for new, old in zip(staged, original, strict=True)]
        return staged if all(new is old for new, old in zip(items, staged, strict=True)) else items
    return copy_to_host(original) if _is_wrapper(original) else staged


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_subclass(memory_of(value))


# Converts the write items of a PyTorch DCP plan to what this rank saves, named as by
# `ucformat.torch.save`.

_BYTES = WriteItemType.BYTE_IO


@dataclass(frozen=True, slots=True)
class LocalItems:
    """All items of a rank, before DCP removes duplicates between ranks.

    `tensors` has an index for each shard, `shapes` the global shapes. `ranks` plan together (0:
    unknown).
    """

    tensors: tuple[MetadataIndex, ...]
    values: tuple[MetadataIndex, ...]
    shapes: Mapping[str, tuple[int, ...]]
    ranks: int = 0


@message
class PlainValues:
    """A rank's plain values as JSON, and the lists with tensors, by path."""

    by_path: Mapping[Path, Any]
    lists: frozenset[Path]


@dataclass(frozen=True, slots=True)
class RankItems:
    """What one rank saves of a plan; `memories` are the host memories of the tensors."""

    tensors: tuple[tuple[TensorInfo, tuple[Piece, ...]], ...]
    memories: tuple[Memory, ...]
    values: PlainValues
    groups: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[Key, tuple[Path, ...]] = field(default_factory=dict)
    places: tuple[GroupPlace, ...] = ()


def local_items(plan: SavePlan) -> LocalItems:
    """Return the items of a local plan, before DCP has compared it with those of other ranks."""
    values = [i.index for i in plan.items if i.type == _BYTES]
    tensors = [i for i in plan.items if i.type != _BYTES]
    shapes = {i.index.fqn: tuple(i.tensor_data.size) for i in tensors}
    return LocalItems(tuple(i.index for i in tensors), tuple(values), shapes)


def collect_items(plan: SavePlan, planner: SavePlanner, local: LocalItems) -> RankItems:
    """Collect what this rank saves."""
    mappings = plan.planner_data
    if not isinstance(mappings, dict):
        mappings = getattr(planner, "mappings", {})
    state = _NestedState(planner, mappings, local)
    aliases = state.aliases()
    tensors, memories = _tensors(plan, planner, state, aliases)
    values: dict[Path, Any] = {
        p: encode(record, dotted(p)) for p, record in records_of(state.collected).items()
    }
    for item in plan.items:
        path = state.path(item.index)
        if item.type == _BYTES and not state.is_option(path):
            value = state.look_up(item.index, _BYTES)
            if isinstance(value, PerRank):
                raise UsageError(
                    f"{dotted(path)} is a PerRank value, but torch.distributed.checkpoint saves "
                    "that of one rank only",
                    hint="save with ucformat.torch.save, or use a key that contains the rank",
                )
            values[path] = packed(encode(value, dotted(path)))
    state_dict = getattr(planner, "state_dict", {})
    return RankItems(
        tensors=tensors,
        memories=memories,
        values=PlainValues(values, state.lists_of_tensors()),
        groups=groups_of(state.collected, aliases),
        aliases=aliases,
        layout=mesh_of([t for t in state_dict.values() if isinstance(t, torch.Tensor)]),
        paths=paths_of(state.collected, aliases),
        places=places_of(state.collected),
    )


def _encodes(planner: SavePlanner) -> bool:
    """Whether a planner of the program encodes values itself."""
    kind, stock, hooks = type(planner), DefaultSavePlanner, ("resolve_data", "transform_object")
    return any(getattr(kind, name, None) is not getattr(stock, name) for name in hooks)


def _encoded(data: bytes) -> Any:
    """The value that a planner encoded: loaded if torch.save wrote plain values, else bytes."""
    if not data.startswith(b"PK"):
        return io.BytesIO(data)
    try:
        with torch.serialization.safe_globals([io.BytesIO, bytes]):
            return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:  # it contains other classes, whose origin is unknown
        return opaque_file(data)


class _Value:
    """A placeholder for a plain value, whose type does not matter to names."""


class _NestedState:
    """A rank's training state as DCP flattened it, nested again."""

    def __init__(
        self, planner: SavePlanner, mappings: Mapping[str, Path], local: LocalItems
    ) -> None:
        self.planner, self.mappings, self.local = planner, mappings, local
        nested: dict[str, Any] = {}
        for index in local.tensors:
            path = self.path(index)
            stand_in = torch.empty(()).expand(local.shapes[index.fqn])
            set_element(nested, path, self.look_up(index) if _below_groups(path) else stand_in)
        for index in local.values:
            path = self.path(index)
            value = self.look_up(index, _BYTES) if _below_groups(path) else _Value()
            set_element(nested, path, value)
        self.collected = collect(nested)
        by_path = self.collected.keys
        #: Name and state of each tensor, except hyper-parameters.
        self.keys = {i.fqn: by_path[p] for i in local.tensors if (p := self.path(i)) in by_path}
        #: The wrappers among them.
        named = [i for i in local.tensors if i.fqn in self.keys]
        self.taken = {i.fqn: t for i in named if (t := self._taken(i)) is not None}
        wrappers = {self.path(i): self.taken[i.fqn] for i in named if i.fqn in self.taken}
        replace_wrappers(self.collected, wrappers)

    def path(self, index: MetadataIndex) -> Path:
        """The path of an entry in the program's state."""
        return self.mappings.get(index.fqn, (index.fqn,))

    def look_up(self, index: MetadataIndex, kind: WriteItemType = WriteItemType.SHARD) -> Any:
        """The value of an entry of this rank, or as the planner encoded it."""
        plain = kind != _BYTES or not _encodes(self.planner)
        if plain and hasattr(self.planner, "lookup_object"):
            return self.planner.lookup_object(index)
        data = self.planner.resolve_data(WriteItem(index, kind))
        return _encoded(data.getvalue()) if isinstance(data, io.BytesIO) else data

    def _taken(self, index: MetadataIndex) -> TakenApart | None:
        """A tensor of this rank taken apart, if it is a wrapper, or a DTensor of one."""
        value = self.look_up(index)
        if why_refused(value) is None:
            return None
        state = getattr(self.planner, "state_dict", {})
        return take_apart(index.fqn, state.get(index.fqn, value))

    def is_option(self, path: Path) -> bool:
        """Whether an entry is part of an optimizer group."""
        return any(path[:i] in self.collected.group_entries for i in range(1, len(path) + 1))

    def aliases(self) -> dict[str, str]:
        """The first name of tied weights of this rank, by each further name."""
        weights = []
        for index in self.local.tensors:
            key = self.keys.get(index.fqn)
            if key is None or key.state != "weight":
                continue
            parts = self.taken.get(index.fqn)
            for names, tensor in (parts.tensors if parts else {(): self.look_up(index)}).items():
                weights.append((index.offset, inner_key(key, names).name, memory_of(tensor)))
        return tied_names(
            (name, tensor, (tensor.shape, offset))
            for offset, name, tensor in weights
            if isinstance(tensor, torch.Tensor) and tensor.numel()
        )

    def lists_of_tensors(self) -> frozenset[Path]:
        """The paths of lists that contain tensors at any depth."""
        paths = self.collected.tensors
        return frozenset(p[:i] for p in paths for i, part in enumerate(p) if isinstance(part, int))


def _below_groups(path: Path) -> bool:
    return any((str(part) + ".").startswith(GROUPS + ".") for part in path)


def _tensors(
    plan: SavePlan, planner: SavePlanner, state: _NestedState, aliases: Mapping[str, str]
) -> tuple[tuple[tuple[TensorInfo, tuple[Piece, ...]], ...], tuple[Memory, ...]]:
    """The tensors that this rank writes, each once, and their host memory."""
    shards: dict[str, list[LocalShard]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        key = state.keys.get(fqn)
        if key is None:
            continue
        inner = state.taken[fqn].tensors if fqn in state.taken else {(): None}
        for names, tensor in inner.items():
            name, kind = inner_key(key, names)
            if kind == "weight" and name in aliases:
                continue
            named = Key(aliases.get(name, name), kind)
            shard = _shard(item, planner, named) if tensor is None else local_of(*named, tensor)
            shards.setdefault(".".join((fqn, *names)), []).append(shard)
    tensors: list[tuple[TensorInfo, tuple[Piece, ...]]] = []
    memories: list[Memory] = []
    by_key: dict[Key, str] = {}
    for fqn, mine in shards.items():
        info = mine[0].info
        earlier = by_key.setdefault(info.key, fqn)
        if earlier != fqn:
            raise UsageError(
                f"{earlier} and {fqn} are both {info.key}", hint="give them different names"
            )
        pieces, memory = _joined(mine)
        tensors.append((info, pieces))
        memories.append(memory)
    return tuple(tensors), tuple(memories)


def _shard(item: WriteItem, planner: SavePlanner, key: Key) -> LocalShard:
    """The shard of a write item, as pieces of the global tensor."""
    local = local_of(key.name, key.state, planner.resolve_data(item))
    data, chunk = item.tensor_data, item.tensor_data.chunk
    if local.info.shape != tuple(chunk.sizes):
        raise LayoutError(
            f"{item.index.fqn}: torch.distributed.checkpoint computes {list(chunk.sizes)} at "
            f"{list(chunk.offsets)} for "
            f"the local shard, but its shape is {list(local.info.shape)}",
            hint=(
                "it is wrong for some uneven shards of one dim over two mesh axes; "
                "ucformat.torch.save is not"
            ),
        )
    info = TensorInfo(key.name, key.state, local.info.dtype, tuple(data.size))
    shift = tuple(chunk.offsets)
    filled = (p for p in local.pieces if p.box.size)
    pieces = tuple(Piece(p.box.shift(shift), p.offset, p.strides) for p in filled)
    return type(local)(info, pieces, local.tensor)


def _joined(shards: Sequence[LocalShard]) -> tuple[tuple[Piece, ...], Memory]:
    """The pieces of all shards of a tensor in one memory; several shards are copied."""
    if len(shards) == 1:
        tensor = shards[0].tensor
        return shards[0].pieces, host_memory(*copied_to_host([tensor]))
    pieces: list[Piece] = []
    parts: list[Memory] = []
    offset = 0
    for shard in shards:
        (on_host,) = copied_to_host([shard.tensor])
        dense = on_host.contiguous()
        pieces += [Piece(p.box, offset, tuple(dense.stride())) for p in shard.pieces]
        parts.append(host_memory(dense))
        offset += dense.numel()
    return tuple(pieces), np.concatenate(parts)


def join_values(parts: Sequence[PlainValues]) -> dict[str, Any]:
    """Join the objects of all ranks, nested as in the program's state."""
    tree: dict[str | int, Any] = {}
    lists = frozenset(p for part in parts for p in part.lists)
    for rank, part in enumerate(parts):
        for path, data in part.by_path.items():
            node = tree
            for step in path[:-1]:
                node = node.setdefault(step, {})
            leaf = node.setdefault(path[-1], Leaf(data))
            if not isinstance(leaf, Leaf) or leaf.data != data:
                raise UsageError(
                    f"the object {dotted(path)} has a different value on rank {rank} than on a "
                    "rank before it",
                    hint="keep values that differ between ranks under keys that contain the rank",
                )
    objects: dict[str, Any] = json_of_tree(tree, lists)
    return objects
