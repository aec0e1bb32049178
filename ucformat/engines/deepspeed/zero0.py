"""ZeRO 0: one file holds the whole module and the whole optimizer, whose entries are numbered.

The content of `optimizer` depends on the precision (DeepSpeed 0.19.8):

- fp32: the optimizer's own state dict; no master, because the weights are fp32 themselves.
- bf16, fp16 (FP16_UnfusedOptimizer): `optimizer_state_dict`, and `fp32_groups`: a list of masters
  for each group.
- the same with a fused Adam (FP16_Optimizer, the usual one on a GPU): `fp32_groups_flat`: one flat
  master for each group, with the module's weights in the same order as views of their storage;
  states are flat too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.experts import is_expert
from ucformat.engines.deepspeed.model_states import (
    hyper_parameters,
    need,
    refuse_flat_state,
    state_of,
    stored,
)
from ucformat.errors import IntegrityError, UsageError, option_text
from ucformat.geometry.box import row_major
from ucformat.reading.stand_ins import StoredTensor
from ucformat.reading.values import shared_value, to_json
from ucformat.sources.index import Group
from ucformat.sources.pickle.optimizer import Candidate, Entry, match, shape_of_states
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ucformat.engines.deepspeed.model_states import ModelStates
    from ucformat.sources.index import Locate, TensorIndex
    from ucformat.sources.pickle.file import TorchFile

_SAMPLE = 64  # elements


def read_zero0(
    model: ModelStates, names: Sequence[Sequence[str]] | None, contents: TensorIndex
) -> None:
    """Add the optimizer's tensors, groups and scalars to the contents.

    Args:
        names: the names of each group's parameters; None: they are derived.
    """
    state = model.value.get("optimizer")
    if state is None:
        return
    state = need(model.value, "optimizer", dict, model.key)
    wrapped = "optimizer_state_dict" in state
    inner = need(state, "optimizer_state_dict", dict, model.key) if wrapped else state
    hypers = need(inner, "param_groups", list, model.key)
    states = _states(inner, model.key)
    for hyper in hypers:
        contents.groups.append(Group([], hyper_parameters(hyper, model.file)))
    if "fp32_groups_flat" in state:
        _flat(model, state["fp32_groups_flat"], states, contents)
    else:
        masters = need(state, "fp32_groups", list, model.key) if wrapped else None
        entries = states if masters is None else [_listed(g, model) for g in masters]
        names = names or _recorded(hypers, [len(group) for group in entries], model)
        _single(model, masters, states, names, contents, [_is_moe(h) for h in hypers])
    own_keys = ("state", "param_groups")
    dropped = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat") if wrapped else own_keys
    contents.keep_scalars(model.file, {k: v for k, v in state.items() if k not in dropped})


def entries_of(model: ModelStates) -> list[list[Entry]] | int:
    """The evidence for each entry of the optimizer's groups; for flat ones, all their elements."""
    state = need(model.value, "optimizer", dict, model.key)
    if "fp32_groups_flat" in state:
        return sum(stored(t, "fp32_groups_flat", model.key).size for t in state["fp32_groups_flat"])
    if "fp32_groups" in state:
        masters = state["fp32_groups"]
        return [[Entry(stored(t, "fp32_groups", model.key).shape) for t in g] for g in masters]
    wrapped = "optimizer_state_dict" in state
    inner = need(state, "optimizer_state_dict", dict, model.key) if wrapped else state
    return [[Entry(shape_of_states(s)) for s in group] for group in _states(inner, model.key)]


def _states(inner: dict[str, Any], file: str) -> list[list[dict[str, Any]]]:
    """The states of each entry of each group of an optimizer."""
    states = need(inner, "state", dict, file)
    groups = [need(g, "params", list, file) for g in need(inner, "param_groups", list, file)]
    return [[state_of(states, i, file) for i in group] for group in groups]


def _recorded(
    hypers: list[dict[str, Any]], counts: list[int], model: ModelStates
) -> list[list[str]] | None:
    """`param_names`, which optimizers constructed with named parameters store (PyTorch 2.6 and later).

    If a group has fewer entries, parameters without elements have none: the wrapper of bf16 and
    fp16 drops them. None if that does not explain it.
    """
    names: list[list[str]] = [list(g.get("param_names") or ()) for g in hypers]
    if [len(g) for g in names] != counts:
        filled = {n for n, tensor in _parameters(model).items() if tensor.size}
        names = [[n for n in group if n in filled] for group in names]
    return names if [len(g) for g in names] == counts else None


def _single(
    model: ModelStates,
    masters: list[list[Any]] | None,
    states: list[list[dict[str, Any]]],
    names: Sequence[Sequence[str]] | None,
    contents: TensorIndex,
    moe: list[bool],
) -> None:
    """Add one entry for each parameter."""
    # of a stack the first expert stands for all
    stacks = {name: experts[0][0] for name, experts in model.stacks.items()}
    parameters = {**_parameters(model), **stacks}
    shapes = {
        n: (len(model.stacks[n]), *t.shape) if n in stacks else t.shape
        for n, t in parameters.items()
    }
    if masters is not None:
        groups = [_listed(group, model) for group in masters]
        copies = [[stored(t, "fp32_groups", model.key) for t in group] for group in groups]
        samples = _samples(model, [t for group in copies for t in group], parameters)
        by_name = dict(zip(parameters, samples[1], strict=True))
        master_samples = iter(samples[0])
        entries = [[Entry(t.shape, next(master_samples)) for t in group] for group in copies]
        if [len(g) for g in states] != [len(g) for g in copies]:
            raise IntegrityError(f"{model.key}: its optimizer entries do not match the fp32 copies")
    else:
        copies, by_name = [], {}
        entries = [[Entry(shape_of_states(s)) for s in group] for group in states]
    candidates = [Candidate(name, shape, by_name.get(name)) for name, shape in shapes.items()]
    if names is None:
        experts = {name for name in parameters if name in stacks or is_expert(name)}
        matched = [_match(entries, order, moe, experts) for order in _orders(candidates, stacks)]
        fitting = [each for each in matched if each is not None]
        names = fitting[0] if fitting and all(each == fitting[0] for each in fitting) else None
    if names is None:
        raise UsageError(
            f"{model.key}: its optimizer states are numbered, and their "
            "shapes and the order of the module do not determine which parameters they belong to",
            hint=f"name them: {option_text('groups')}",
        )
    _check_names(names, entries, {c.name: c for c in candidates}, model.key)
    for g, group in enumerate(names):
        contents.groups[g].names = list(group)
        plain: dict[str, Any] = {}
        for i, name in enumerate(group):
            if copies:
                contents.add_whole(name, "master", model.file, copies[g][i])
            for state, value in states[g][i].items():
                if isinstance(value, StoredTensor):
                    contents.add_whole(name, state, model.file, value)
                else:
                    number = to_json(value, read=model.file.read, path=state)
                    plain.setdefault(state, {})[name] = number
        stateful = sum(map(bool, states[g]))  # a parameter that never had a gradient has no state
        contents.groups[g].state = {s: shared_value(v, stateful) for s, v in plain.items()}


def _listed(group: Any, model: ModelStates) -> list[Any]:
    if not isinstance(group, list):
        raise IntegrityError(f"{model.key}: a group of `fp32_groups` is a {type(group).__name__}")
    return group


def _is_moe(hyper: Any) -> bool:
    """Whether DeepSpeed made the group for experts."""
    return isinstance(hyper, dict) and bool(hyper.get("moe"))


def _orders(candidates: list[Candidate], stacks: Collection[str]) -> list[list[Candidate]]:
    """The orders in which an optimizer may have been given the parameters.

    AutoEP puts the parameters of the layers that it makes, which are a router's beside stacked
    experts, behind those that a program gave.
    """
    made = tuple(f"{name.rpartition('.experts.')[0]}." for name in stacks)
    first = [c for c in candidates if not c.name.startswith(made)]
    last = [c for c in candidates if c.name.startswith(made)]
    return [candidates, first + last] if last else [candidates]


def _match(
    entries: list[list[Entry]],
    candidates: list[Candidate],
    moe: list[bool],
    experts: Collection[str],
) -> list[list[str]] | None:
    """The names of the entries; groups for experts hold all experts and nothing else."""
    if not any(moe):
        return match(entries, candidates)
    names: dict[int, list[str]] = {}
    for kind in (True, False):
        groups = [g for g, is_moe in enumerate(moe) if is_moe is kind]
        of_kind = [c for c in candidates if (c.name in experts) is kind]
        matched = match([entries[g] for g in groups], of_kind)
        if matched is None:
            return None
        names.update(zip(groups, matched, strict=True))
    return [names[g] for g in range(len(moe))]


def _check_names(
    names: Sequence[Sequence[str]],
    entries: list[list[Entry]],
    candidates: dict[str, Candidate],
    file: str,
) -> None:
    """Check that the names exist, and that there is one that fits for each entry."""
    if [len(g) for g in names] != [len(g) for g in entries]:
        raise UsageError(
            f"{file}: {[len(g) for g in names]} names are given for groups of "
            f"{[len(g) for g in entries]} entries"
        )
    for group, group_entries in zip(names, entries, strict=True):
        for name, entry in zip(group, group_entries, strict=True):
            if name not in candidates or not candidates[name].fits(entry):
                raise UsageError(
                    f"{file}: {name} cannot be the optimizer entry at its place in the group "
                    "(its shape, or its fp32 "
                    "copy, "
                    "is another)",
                    hint=(
                        "the names must be those of `module`, in the order in which the "
                        "optimizer was given them"
                    ),
                )


def _parameters(model: ModelStates) -> dict[str, StoredTensor]:
    """The tensors of the module that may be parameters."""
    aliases = model.aliases(zero3=False)
    return {n: t for n, t in model.module.items() if n not in model.buffers and n not in aliases}


def _samples(
    model: ModelStates, masters: list[StoredTensor], weights: dict[str, StoredTensor]
) -> tuple[list[bytes], list[bytes]]:
    """The first elements of masters, rounded to the weights' dtype, and of weights."""
    low = {t.dtype for t in weights.values()} & {"bfloat16", "float16"} or {"float32"}
    dtype = min(low)
    rounded = map_io(lambda t: sample(model.file, t, dtype), masters)
    homes = [(model.home(name), tensor) for name, tensor in weights.items()]
    return rounded, map_io(lambda item: sample(*item, dtype), homes)


def sample(file: TorchFile, tensor: StoredTensor, dtype: str) -> bytes:
    """The first 64 elements of a tensor, cast to another dtype, as bytes."""
    import ml_dtypes
    import numpy as np

    bf16 = np.dtype(ml_dtypes.bfloat16)
    types = {"bfloat16": bf16, "float16": np.dtype("f2"), "float32": np.dtype("f4")}
    if tensor.dtype not in types:
        return b"?"
    head = np.frombuffer(file.read_head(tensor, _SAMPLE), types[tensor.dtype])
    with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged, too
        return head.astype(types[dtype]).tobytes()


def _flat(
    model: ModelStates,
    masters: list[Any],
    states: list[list[dict[str, Any]]],
    contents: TensorIndex,
) -> None:
    """Add one flat entry per group, with the offsets of the weights in their storage."""
    if len(masters) != len(states) or any(len(s) != 1 for s in states):
        raise IntegrityError(f"{model.key}: its optimizer groups do not match the flat masters")
    by_storage: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name, tensor in _parameters(model).items():
        if tensor.size:
            storage = (model.home(name).key, tensor.storage)
            by_storage.setdefault(storage, []).append((tensor.offset, name))
    free = {key: sorted(members) for key, members in by_storage.items()}
    for g, value in enumerate(masters):
        master = stored(value, "fp32_groups_flat", model.key)
        fitting = [key for key, members in free.items() if _tiles(model, members, master)]
        if len(fitting) != 1:
            raise UsageError(
                f"{model.key}: {len(fitting) or 'no'} sets of weights fit the {master.size} "
                "elements of its flat "
                f"group {g}, so "
                "its optimizer states cannot be named",
                hint="please report this checkpoint",
            )
        members = free.pop(fitting[0])
        contents.groups[g].names = [name for _, name in members]
        plain = {k: v for k, v in states[g][0].items() if not isinstance(v, StoredTensor)}
        contents.groups[g].state = to_json(plain, read=model.file.read, path="state")
        tensors = {k: v for k, v in states[g][0].items() if isinstance(v, StoredTensor)}
        for offset, name in members:
            shape = model.module[name].shape
            for state, tensor in {"master": master, **tensors}.items():
                if not tensor.shape and state != "master":
                    contents.add_whole(name, state, model.file, tensor)
                elif tensor.shape != (master.size,):
                    raise refuse_flat_state(state, tensor, g, model.key)
                else:
                    locate = _locator(model, tensor, offset, shape)
                    contents.add(name, state, tensor.dtype, shape, locate)


def _tiles(model: ModelStates, members: list[tuple[int, str]], master: StoredTensor) -> bool:
    """Whether these views fill their storage, and equal the master of that length, rounded."""
    tensors = [model.module[name] for _, name in members]
    offset = 0
    for tensor in tensors:
        if tensor.offset != offset or tensor.strides != row_major(tensor.shape):
            return False
        offset += tensor.size
    if offset != tensors[0].numel or offset != master.size:
        return False
    starts = [(t.size, master.offset + t.offset) for t in tensors]
    parts = [replace(master, shape=(n,), strides=(1,), offset=start) for n, start in starts]
    rounded, weights = _samples(model, parts, {name: model.module[name] for _, name in members})
    return rounded == weights


def _locator(
    model: ModelStates, tensor: StoredTensor, offset: int, shape: tuple[int, ...]
) -> Locate:
    return lambda _: model.file.flat(tensor, offset, shape, 0, math.prod(shape))
