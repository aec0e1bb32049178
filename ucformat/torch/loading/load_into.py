"""`load_into` fills a module for inference: from any checkpoint, in the memory of the module or on new devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack

import torch
from torch.distributed.tensor import DTensor

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError, check_choice, check_keywords
from ucformat.geometry.tensor import Key
from ucformat.reading.execute import ReadOptions
from ucformat.reading.plan import check_verify
from ucformat.reading.rank import LOAD_INVALID, Bound
from ucformat.reading.readable import TRACKERS
from ucformat.references import open_reference
from ucformat.storage.cache.scope import consistent
from ucformat.storage.wrappers import checking_unchanged
from ucformat.torch.loading.arguments import ReadArguments
from ucformat.torch.loading.match import (
    PARAMETER,
    Problems,
    asked_tensors,
    match,
    overlaps,
    parameter_of,
    raise_for,
    renamed_keys,
    stored_names,
)
from ucformat.torch.loading.read import read
from ucformat.torch.loading.values import SavedState
from ucformat.torch.state.collect import acts_on_load
from ucformat.torch.state.local import local_of, tied_names
from ucformat.torch.state.memory import torch_dtype
from ucformat.torch.state.sharded import is_fsdp1
from ucformat.torch.state.subclasses import check_live, is_subclass, memory_of, take_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from os import PathLike

    from ucformat.geometry.bound import LocalTensor
    from ucformat.geometry.layout import Layout
    from ucformat.torch.state.local import LocalShard
    from ucformat.torch.state.subclasses import TakenApart

__all__ = ["LoadedKeys", "load_into"]

_Holder = tuple[dict[str, torch.Tensor | None], str]


class LoadedKeys(NamedTuple):
    """What did not fit, as `torch.nn.Module.load_state_dict` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_into(
    model: torch.nn.Module,
    ref: str | PathLike[str] | Checkpoint,
    *,
    strict: bool = True,
    layout: Layout | None = None,
    rank: int | None = None,
    dtype: torch.dtype | Literal["checkpoint"] | None = None,
    device: str | torch.device = "cpu",
    **arguments: Unpack[ReadArguments],
) -> LoadedKeys:
    """Fill the parameters and persistent buffers of a module from a checkpoint, without optimizer states and groups.

    Weights are read straight into the memory of the module where it has their dtype and is on the
    host; the others pass through 64 MiB of host memory, and are converted as `tensor.to(dtype)`
    does. Parameters on the meta device get memory. Tied ones stay tied, and are read once. Of a
    DTensor its own part is read. Each rank calls this by itself. All mismatches are found before
    anything is changed, and raised in one error.

    Args:
        model: the module. Buffers on the meta device that checkpoints do not contain are computed
            if the model can do that, as those of Transformers can.
        ref: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint. A weight is read in state `weight`, or `master` if only that is stored.
        strict: whether names that only the module or only the checkpoint has are an error
            (default); else they are returned.
        layout: how the module is sharded, if its parameters are plain tensors that hold a rank's
            part.
        rank: the rank in the layout's mesh (default: that of torch.distributed).
        dtype: of floating-point weights in the module afterwards, or `"checkpoint"`: each weight as
            it is stored (default: as they are in the module).
        device: on which parameters of the meta device get memory.
        arguments: those of `ReadArguments`, by keyword.

    Returns:
        the names that only the module has, and those that only the checkpoint has; both are empty
        if `strict`.

    Raises:
        StateMismatch: names are missing or unexpected (only if `strict`), or shapes differ; the
            message lists all.
        UnsupportedError: FSDP1 has wrapped the module, or a part of it.
        UsageError: a buffer on the meta device cannot be computed, or the layout has no such rank.
        ChecksumError: a chunk does not match its checksum; the contents of the module are
            undefined.
        Conflict: a file of the checkpoint has changed since it was opened.
    """
    check_keywords("load_into", arguments, ReadArguments)
    if any(map(is_fsdp1, model.modules())):
        raise UnsupportedError(
            "load_into does not fill the flat parameters of FSDP1",
            hint='use ucformat.torch.load({"model": model}, …), or load before the module is wrapped',
        )
    rename = arguments.get("rename")
    if layout is not None and rename is not None:
        raise UsageError(
            "both `layout` and `rename` are given",
            hint="put the renames into the layout: `renames`",
        )
    if not isinstance(dtype, torch.dtype):
        check_choice("dtype", dtype, (None, "checkpoint"))
    verify = check_verify(arguments.get("verify", "whole"))
    ck = ref if isinstance(ref, Checkpoint) else open_reference(ref)
    if layout is not None and layout.view:
        ck = ck.view(layout)
    names = stored_names(ck, layout.rename if layout is not None else rename)
    slots = _slots(model)
    absent = _buffers_to_compute(model)
    parts = None if layout is None else _Parts(ck, layout, _rank(rank))
    slot_targets = [
        _slot_target(slot, names, ck, parts, dtype, torch.device(device)) for slot in slots
    ]
    aliases = {alias: slot.name for slot in slots for alias in slot.names[1:]}
    fitting = [w for w in slot_targets if w.problem is None]
    shapes = tuple(w.problem for w in slot_targets if w.problem is not None)
    targets = [w.target for w in fitting]
    matched, problems, meant = match(targets, aliases, ck, names, cast=True, as_lazy=True)
    misfits = {names.get(n) for w in slot_targets if w.problem is not None for n in w.slot.names}
    asked = asked_tensors(ck, meant, targets)
    unexpected = compress(ck.tensors, asked.unexpected(len(ck.tensors)))
    lacking = [key for key in unexpected if key.name not in misfits]
    unexpected_names = list(dict.fromkeys(key.name for key in renamed_keys(lacking, names)))
    loaded = {m.target.info.name for m in matched}
    labels = {*problems.missing}
    missing = [n for w in fitting if str(w.target.key) in labels for n in w.slot.names]
    problems = replace(
        problems,
        missing=tuple(missing),
        unexpected=tuple(unexpected_names),
        shapes=(*shapes, *problems.shapes),
        others=(*problems.others, *_other_wrappers(slots, names, ck)),
    )
    in_memory = [
        local_of(slot.name, "weight", slot.tensor) for slot in slots if not slot.tensor.is_meta
    ]
    problems |= Problems(others=tuple(overlaps(in_memory, (), ck).values()))
    raise_for(problems if strict else replace(problems, missing=(), unexpected=()), True, ck.url)
    unchanged = checking_unchanged(ck.store, LOAD_INVALID, TRACKERS)
    with torch.no_grad(), consistent(), unchanged:
        for w in fitting:
            if w.padded:
                w.tensor.zero_()
        read(ck, matched, ReadOptions(verify, threads=arguments.get("threads")))
    for w in fitting:
        if w.slot.name in loaded:
            w.put()
    if absent:
        _compute_buffers(model, absent, torch.device(device))
    # loaders and hooks of modules that make other tensors of what is loaded have not run yet
    if any(map(acts_on_load, model.modules())) and not any(p.is_meta for p in model.parameters()):
        model.load_state_dict(model.state_dict(), strict=False)
    return LoadedKeys(missing, unexpected_names)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter or buffer: its names, the tied ones included, and the modules that have it, with their attributes.

    Of one that is a wrapper, each tensor inside is a slot.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    holders: tuple[_Holder, ...]
    wrapper: _Wrapper | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]


def _slots(model: torch.nn.Module) -> list[_Slot]:
    """The parameters and persistent buffers of a module, each once."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie) and any(p.is_meta for p in model.parameters()):
        tie()  # accelerate's init_empty_weights makes separate parameters of tied ones
    entries: list[_LoadedEntry] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix_dot = f"{prefix}." if prefix else ""
        stored = set(module._buffers) - module._non_persistent_buffers_set  # noqa: SLF001 - as Module.state_dict does
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001
            for attribute, tensor in tensors.items():
                if tensor is not None and (tensors is module._parameters or attribute in stored):  # noqa: SLF001
                    entries += _entries(f"{prefix_dot}{attribute}", tensor, (tensors, attribute))
    memory = ((e.name, memory_of(e.tensor), e.tensor.shape) for e in entries)
    tied = tied_names((n, t, (shape,)) for n, t, shape in memory if not t.is_meta and t.numel())
    first: dict[int, str] = {}
    groups: dict[str, list[_LoadedEntry]] = {}
    for entry in entries:
        name = first.setdefault(id(entry.tensor), tied.get(entry.name, entry.name))
        groups.setdefault(name, []).append(entry)
    return [
        _Slot(g[0].tensor, tuple(e.name for e in g), tuple(e.holder for e in g), g[0].wrapper)
        for g in groups.values()
    ]


class _Wrapper(NamedTuple):
    """A wrapper of a module, and what is inside."""

    name: str
    tensor: torch.Tensor
    contents: TakenApart


class _LoadedEntry(NamedTuple):
    """A parameter or buffer, or a tensor inside one that is a wrapper, and the module that has it."""

    name: str
    tensor: torch.Tensor
    holder: _Holder
    wrapper: _Wrapper | None = None


def _entries(name: str, tensor: torch.Tensor, holder: _Holder) -> list[_LoadedEntry]:
    """What is filled of a parameter or buffer: the tensor, or of a wrapper what is inside."""
    local = memory_of(tensor)
    contents = take_apart(name, tensor) if not local.is_meta or is_subclass(local) else None
    if contents is None:
        return [_LoadedEntry(name, tensor, holder)]
    check_live(name, tensor, contents)
    wrapper = _Wrapper(name, tensor, contents)
    return [
        _LoadedEntry(".".join((name, *names)), inner, holder, wrapper)
        for names, inner in contents.tensors.items()
    ]


def _other_wrappers(
    slots: Iterable[_Slot], names: Mapping[str, str], ck: Checkpoint
) -> Iterator[str]:
    """The wrappers of a module that are not those of the checkpoint."""
    wrappers = {s.wrapper.name: s.wrapper for s in slots if s.wrapper is not None}
    recorded = SavedState(ck, names) if wrappers else None
    for name, wrapper in wrappers.items():
        keys = {
            inside: Key(".".join((name, *inside)), "weight") for inside in wrapper.contents.tensors
        }
        assert recorded is not None  # noqa: S101 - there are wrappers
        difference = recorded.other_wrapper((name,), keys, wrapper.contents)
        if difference is not None:
            yield f"{name} {difference}"


@dataclass(frozen=True, slots=True)
class _SlotTarget:
    """A slot, the memory that is filled for it, and why that is not possible (None: it is)."""

    slot: _Slot
    target: LocalShard
    tensor: torch.Tensor
    problem: str | None = None
    padded: bool = False  # by the layout, with zeros that no checkpoint contains

    def put(self) -> None:
        """Let the modules have the memory, if it is new."""
        old = self.slot.tensor
        if self.tensor is old:
            return
        new = self.tensor
        if isinstance(old, torch.nn.Parameter):
            needs_grad = old.requires_grad and new.dtype.is_floating_point
            new = torch.nn.Parameter(new, requires_grad=needs_grad)
            new.__dict__.update(old.__dict__)
        for holder, attribute in self.slot.holders:
            holder[attribute] = new


def _slot_target(
    slot: _Slot,
    names: Mapping[str, str],
    ck: Checkpoint,
    parts: _Parts | None,
    dtype: torch.dtype | Literal["checkpoint"] | None,
    device: torch.device,
) -> _SlotTarget:
    old = slot.tensor
    if slot.wrapper is not None:
        target = replace(local_of(slot.name, "weight", old), wrapper=slot.wrapper.name)
        problem = (
            None
            if parts is None
            else f"{slot.name} is inside a wrapper, of which a layout holds no part"
        )
        return _SlotTarget(slot, target, old, problem)
    stored = next((i for n in slot.names if n in names for i in parameter_of(names[n], ck)), None)
    target_dtype = old.dtype
    if dtype == "checkpoint":
        target_dtype = old.dtype if stored is None else torch_dtype(stored.dtype)
    elif dtype is not None and target_dtype.is_floating_point:
        target_dtype = dtype
    usable = (
        not old.is_meta and target_dtype == old.dtype and (parts is None or old.is_contiguous())
    )
    tensor = old if usable else _empty(old, target_dtype, device if old.is_meta else old.device)
    target = local_of(slot.name, "weight", tensor)
    if parts is None or stored is None:
        return _SlotTarget(slot, target, tensor)
    local = parts.local(Key(stored.name, stored.state))
    if local is None or local.shape != tuple(old.shape) or local.buffer is not None:
        place = (
            "nothing"
            if local is None
            else "a part of a flat buffer"
            if local.buffer
            else str(list(local.shape))
        )
        problem = f"{slot.name} is {list(old.shape)}, and rank {parts.rank} of the layout has {place} of it"
        return _SlotTarget(slot, target, tensor, problem)
    info = replace(target.info, shape=stored.shape)
    return _SlotTarget(
        slot, replace(target, info=info, pieces=local.pieces), tensor, padded=bool(local.padding)
    )


def _empty(like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return torch.empty(like.shape, dtype=dtype, device=device)
    local = torch.empty(like.to_local().shape, dtype=dtype, device=device)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class _Parts:
    """The part of each stored tensor that a rank of a layout holds."""

    def __init__(self, ck: Checkpoint, layout: Layout, rank: int) -> None:
        self.rank = rank
        states = sorted({key.state for key in ck.tensors} & set(PARAMETER))
        self._bound = Bound.of(ck.source.metadata.tensor_list, layout, states)
        self._keys = {info.key: key for key, info in self._bound.stored.items()}
        if not 0 <= rank < self._bound.layout.ranks:
            raise UsageError(
                f"there is no rank {rank}", hint=f"the layout has {self._bound.layout.ranks} ranks"
            )

    def local(self, key: Key) -> LocalTensor | None:
        """What the rank holds of a tensor; None if that is nothing."""
        return self._bound.layout.local(self._keys[key], self.rank)


def _rank(rank: int | None) -> int:
    if rank is not None:
        return rank
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    raise UsageError(
        "`layout` needs a rank",
        hint="pass rank=, or call torch.distributed.init_process_group first",
    )


def _meta_buffers(module: torch.nn.Module) -> Iterator[str]:
    """The names of non-persistent buffers of a module itself that are on the meta device."""
    for name in sorted(module._non_persistent_buffers_set):  # noqa: SLF001
        buffer = module._buffers.get(name)  # noqa: SLF001
        if buffer is not None and buffer.is_meta:
            yield name


def _buffers_to_compute(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with buffers that no checkpoint contains and that have no values."""
    modules = [
        (prefix, module) for prefix, module in model.named_modules() if any(_meta_buffers(module))
    ]
    if modules and not callable(getattr(model, "initialize_weights", None)):
        prefix, module = modules[0]
        name = f"{prefix}.{next(_meta_buffers(module))}".lstrip(".")
        raise UsageError(
            f"the buffer {name} is on the meta device and not persistent: no checkpoint contains "
            "it",
            hint=(
                "make the model `with accelerate.init_empty_weights():`, which gives buffers "
                "values, or assign it"
            ),
        )
    return [module for _, module in modules]


def _compute_buffers(
    model: torch.nn.Module, modules: Iterable[torch.nn.Module], device: torch.device
) -> None:
    """Let a model of Transformers compute buffers, and initialize nothing else."""
    modules = list(modules)
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = True  # noqa: SLF001 - the mark of Transformers
        module._is_hf_initialized = module not in modules  # noqa: SLF001
    for module in modules:
        for name in _meta_buffers(module):
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)  # noqa: SLF001
    model.initialize_weights()
