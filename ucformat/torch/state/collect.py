"""Walks the nested training state of a program, and collects its tensors, values and optimizer groups by path."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import StateMismatch, UnsupportedError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import IntKey
from ucformat.reading.state_names import GROUPS, dotted, name_state, optimizer_roots, split_option
from ucformat.torch.integration import integrations
from ucformat.torch.state.flat import FlatModule, FlatPart
from ucformat.torch.state.groups import (
    CollectedGroup,
    GroupOptions,
    LiveOptimizer,
    flattened_groups,
    is_group,
)
from ucformat.torch.state.names import GlobalNames, plain_name, with_extra_state
from ucformat.torch.state.objects import PerRank, Rng, StateParts
from ucformat.torch.state.sharded import (
    adopt_groups,
    check_local_states,
    dtensor_class,
    is_cut_by_context,
    is_flattened,
    is_fsdp1,
    is_sharded_tensor,
    local_optimizer,
)
from ucformat.torch.state.subclasses import (
    RECORD,
    check_memory,
    is_subclass,
    is_usual,
    memory_of,
    take_apart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.integration import AttachedEntries
    from ucformat.torch.state.flat import FlatSlot
    from ucformat.torch.state.subclasses import TakenApart

    Modules = list[tuple[Path, torch.nn.Module]]


@dataclass(frozen=True, slots=True)
class ValueSlot:
    """A non-tensor value of a state, and a function that replaces it."""

    value: Any
    put: Callable[[Any], None]


@dataclass(slots=True)
class CollectedState:
    """The parts of a state, by path; the functions `finish` are called when all of them are loaded.

    Instead of a wrapper, `tensors` has its inner tensors (`InnerTensor` if a DTensor shards the
    wrapper), and `wrapper_of` the path of the wrapper of each. What FSDP1 cuts is a `FlatPart`.
    """

    entries: tuple[str, ...] = ()  # the keys of the state, but those of its own tensors
    global_names: GlobalNames = field(default_factory=lambda: GlobalNames({}))
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    wrappers: dict[Path, tuple[torch.Tensor, TakenApart]] = field(default_factory=dict)
    wrapper_of: dict[Path, Path] = field(default_factory=dict)
    leaves: dict[Path, ValueSlot] = field(default_factory=dict)
    ranks: dict[Path, tuple[PerRank, ValueSlot]] = field(default_factory=dict)
    groups: dict[Path, list[CollectedGroup]] = field(default_factory=dict)
    # entries that are optimizer groups or hyper-parameters
    group_entries: set[Path] = field(default_factory=set)
    finish: list[Callable[[], None]] = field(default_factory=list)
    # lines for entries that their module does not take back
    unloadable: list[str] = field(default_factory=list)
    # several for the parts of a model
    optimizers: dict[Path, list[LiveOptimizer]] = field(default_factory=dict)
    # state dicts with groups
    optimizer_dicts: dict[Path, MutableMapping[str, Any]] = field(default_factory=dict)
    # may have any shape
    extra_states: dict[Path, Callable[[torch.Tensor], None]] = field(default_factory=dict)
    # of each optimizer, the module with its parameters
    owners: dict[Path, Path] = field(default_factory=dict)
    keys: dict[Path, Key] = field(default_factory=dict)  # the name and state of each tensor
    # of the names of each optimizer's parameters
    prefixes: dict[Path, str] = field(default_factory=dict)
    flat_modules: dict[int, FlatModule] = field(default_factory=dict)  # by the module's `id`

    def drop(self, path: Path) -> None:
        """Leave out what is at a path: of a wrapper all that is inside."""
        wrapper = self.wrapper_of.get(path)
        inside = (
            [path]
            if wrapper is None
            else [p for p in self.wrapper_of if self.wrapper_of[p] == wrapper]
        )
        for inner_path in inside:
            for entries in (self.tensors, self.leaves, self.keys, self.wrapper_of):
                entries.pop(inner_path, None)
        if wrapper is not None:
            self.wrappers.pop(wrapper, None)


def collect(
    state: Mapping[str, Any], names: Mapping[str, int] = MappingProxyType({})
) -> CollectedState:
    """Collect the parts of a training state.

    Args:
        names: which numbers in the names of modules and of parameters are others in the whole model.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            f"a training state is a mapping, not a {type(state).__name__}",
            hint='{"model": model, …}',
        )
    collected = CollectedState(
        tuple(str(k) for k, v in state.items() if not isinstance(v, torch.Tensor)),
        global_names=GlobalNames(names),
    )
    _walk(
        collected,
        (),
        state,
        [(p, m) for p, m in values_of(state) if isinstance(m, torch.nn.Module)],
    )
    for path, value in collected.tensors.items():
        if is_usual(value) and is_cut_by_context(value):
            raise UsageError(
                f"{dotted(path)} may be a part that context_parallel has cut, inside its context",
                hint="save and load outside of the `with context_parallel(…)` block",
            )
    with torch.no_grad():  # in which it is faster to ask for the local tensors of DTensors
        contents = {
            p: t
            for p, value in collected.tensors.items()
            if not is_usual(value) and (t := _taken_apart(p, value)) is not None
        }
    optimized = [
        (collected.owners[root], live.params)
        for root, lives in collected.optimizers.items()
        for live in lives
    ]
    collected_texts = set(map(dotted, collected.tensors)) if optimized else set()
    hidden = {
        (*o, n): tuple(p.size())
        for o, params in optimized
        for n, p in params.items()
        if dotted((*o, n)) not in collected_texts
    }
    naming = name_state(
        hidden
        | {p: tuple(t.size()) for p, t in collected.tensors.items()},  # hooks may hide parameters
        optimizer_roots([*collected.tensors, *collected.leaves]) | set(collected.groups),
        collected.owners,
        {
            root: [name for g in groups for name in g.params]
            for root, groups in collected.groups.items()
        },
    )
    collected.keys, collected.prefixes = (
        {p: naming.keys[p] for p in collected.tensors},
        naming.prefixes,
    )
    replace_wrappers(collected, contents)
    return collected


def _taken_apart(path: Path, tensor: Any) -> TakenApart | None:
    """A wrapper taken apart; None if it is plain; UsageError if it can be neither saved nor filled."""
    if is_sharded_tensor(tensor):
        for shard in tensor.local_shards():
            check_memory(dotted(path), shard.tensor)
        return None
    if isinstance(tensor, FlatPart):
        tensor.check(dotted(path))
        return None
    return take_apart(dotted(path), tensor)


def replace_wrappers(collected: CollectedState, contents_of: Mapping[Path, TakenApart]) -> None:
    """Put the inner tensors of wrappers in their places; UsageError if two entries of the state have one name then."""
    tensors, keys = collected.tensors, collected.keys
    if contents_of:
        collected.tensors, collected.keys = {}, {}
    for path, tensor in tensors.items() if contents_of else ():
        if path not in contents_of:
            collected.tensors[path], collected.keys[path] = tensor, keys[path]
            continue
        if contents_of[path].records:
            collected.wrappers[path] = (tensor, contents_of[path])
        for names, inner in contents_of[path].tensors.items():
            collected.tensors[*path, *names], collected.keys[*path, *names] = (
                inner,
                inner_key(keys[path], names),
            )
            if names:
                collected.wrapper_of[*path, *names] = path
    _check_names(collected)


def inner_key(key: Key, names: tuple[str, ...]) -> Key:
    """Return the name and state of an inner tensor, of those of its wrapper."""
    if key.state == "weight":
        return Key(".".join((key.name, *names)), key.state)
    return Key(key.name, ".".join((key.state, *names)))


def _check_names(collected: CollectedState) -> None:
    """UsageError if two entries have the same dotted path."""
    records = [
        (*path, *names, RECORD)
        for path, (_, contents) in collected.wrappers.items()
        for names in contents.records
    ]
    paths = [*collected.tensors, *records, *collected.leaves, *collected.ranks]
    firsts: dict[str, Path] = {}
    for path in paths if len(set(map(dotted, paths))) < len(paths) else ():
        if firsts.setdefault(name := dotted(path), path) is not path:
            raise UsageError(
                f"two entries of the state are named {name}: {list(firsts[name])} and {list(path)}",
                hint="rename one: an entry is named by its keys, joined by dots",
            )


def values_of(state: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The values of nested mappings, with their paths."""
    if type(state) is torch.Tensor:  # most are
        return [(path, state)]
    if isinstance(state, Mapping):
        return [v for key, inner in state.items() for v in values_of(inner, (*path, key))]
    if isinstance(state, StateParts):
        return [(path, part) for part in state.parts]
    return [(path, state)]


def _walk(
    collected: CollectedState, path: Path, value: Any, modules: Modules, put: Any = None
) -> None:
    if isinstance(value, torch.Tensor):
        collected.tensors[path] = value
    elif isinstance(value, torch.nn.Module):
        _module(collected, path, value)
    elif isinstance(value, torch.optim.Optimizer):
        _optimizer(collected, path, value, modules)
    elif isinstance(value, StateParts):
        for part in value.parts:
            _walk(collected, path, part, modules)
    elif isinstance(value, PerRank):
        collected.ranks[path] = (
            value,
            _leaf(value.value, lambda new: setattr(value, "value", new)),
        )
    elif isinstance(value, Rng):
        collected.ranks[path] = (PerRank(value, value.merge), _leaf(value, put))
    elif isinstance(value, torch.utils.data.DataLoader) and hasattr(value, "load_state_dict"):
        collected.ranks[path] = (PerRank(value), _leaf(value, put))
    elif isinstance(value, Mapping):
        _mapping(collected, path, value, modules, put)
    elif isinstance(value, list | tuple) and _holds_tensors(value):
        _sequence(collected, path, value, modules, put)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        _stateful(collected, path, value, modules)
    else:
        collected.leaves[path] = ValueSlot(value, put or NoPlace(path))


def _mapping(
    collected: CollectedState, path: Path, value: Mapping[Any, Any], modules: Modules, put: Any
) -> None:
    odd = [k for k in value if type(k) not in (str, int)]
    if odd and (_holds_tensors(value) or put is None):
        raise UsageError(
            f"{dotted(path) or 'the state'} has the key {odd[0]!r}, but keys must be strings or "
            "integers",
            hint=(
                "use a string as key, or a dictionary of plain values without tensors, which "
                "may have any keys"
            ),
        )
    if odd:  # one value as a whole
        collected.leaves[path] = ValueSlot(value, put)
        return
    groups = value.get(GROUPS)
    if isinstance(groups, list) and groups and all(map(is_group, groups)):
        collected.groups[path] = [
            CollectedGroup(tuple(g["params"]), GroupOptions(g)) for g in groups
        ]
        group_keys = {GROUPS}
    else:
        flat = [k for k in value if isinstance(k, str) and k.startswith(GROUPS)]
        group_keys = {k for k in flat if all(split_option(k))}
        if group_keys:
            collected.groups[path] = flattened_groups(value, group_keys)
    collected.group_entries |= {(*path, k) for k in group_keys}
    if (group_keys or isinstance(groups, list)) and isinstance(value, MutableMapping):
        collected.optimizer_dicts[path] = value
    if not value and put is not None:
        collected.leaves[path] = ValueSlot({}, _refill(value, put))
    for key, inner in value.items():
        if key not in group_keys:
            below = (*path, IntKey(key) if isinstance(key, int) else key)
            if isinstance(inner, torch.Tensor):
                collected.tensors[below] = inner
                continue
            place = _setter(value, key) if isinstance(value, MutableMapping) else NoPlace(below)
            _walk(collected, below, inner, modules, place)


def _sequence(
    collected: CollectedState, path: Path, value: Any, modules: Modules, put: Any
) -> None:
    items = value if isinstance(value, list) else list(value)
    for i, inner in enumerate(items):
        _walk(
            collected,
            (*path, i),
            inner,
            modules,
            put if isinstance(put, NoPlace) else _setter(items, i),
        )
    if items is value:
        return

    def rebuild() -> None:
        """Replace the tuple, if items were replaced."""
        if any(new is not old for new, old in zip(items, value, strict=True)):
            (put or NoPlace(path))(
                type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            )

    collected.finish.append(rebuild)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(v) for v in value)
    return isinstance(
        value,
        torch.Tensor | torch.nn.Module | torch.optim.Optimizer | StateParts | PerRank,
    )


def _refill(value: Mapping[Any, Any], put: Callable[[Any], None]) -> Callable[[Any], None]:
    """A function that fills an empty mapping, which keeps its class, or replaces it by a value of another kind."""

    def fill(new: Any) -> None:
        if isinstance(new, Mapping) and isinstance(value, MutableMapping):
            value.update(new)
        else:
            put(new)

    return put if isinstance(put, NoPlace) else fill


def _setter(holder: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        holder[key] = value

    return put


class NoPlace:
    """Refuses to replace a value, whose holder cannot be changed."""

    def __init__(self, path: Path) -> None:
        self.why = f"{dotted(path)} cannot be replaced where it is; use a list or a dictionary"

    def __call__(self, _: Any) -> None:
        """Raise the error."""
        raise UsageError(self.why)


def _leaf(value: Any, put: Any) -> ValueSlot:
    """The slot of a per-rank value."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return ValueSlot(value.state_dict(), value.load_state_dict)

    if isinstance(value, torch.Tensor):
        check_memory("a per-rank value", value)

    def set_value(new: Any) -> None:
        if isinstance(value, torch.Tensor):
            value.copy_(new)
        elif put is not None:
            put(new)

    return ValueSlot(value, set_value)


def _stateful(collected: CollectedState, path: Path, value: Any, modules: Modules) -> None:
    """An object with a state dict: one value if that contains no tensors, else its entries, loaded at the end."""
    state = value.state_dict()
    if not _holds_tensors(state):
        collected.leaves[path] = ValueSlot(state, value.load_state_dict)
        return
    _walk(collected, path, state, modules)
    collected.finish.append(lambda: value.load_state_dict(state))


def _module(collected: CollectedState, path: Path, module: torch.nn.Module) -> None:
    """A module's state dict: what shares memory with the module is filled in place, the rest is loaded at the end."""
    flat = _flat_module(collected, path, module)
    if flat is not None:
        _fsdp1(collected, path, flat)
        return
    _check_tensors(path, module)
    entries = module.state_dict()
    memory = _storages([*module.parameters(), *module.buffers()])
    copies: list[str] = []
    attached = _attached(module, entries.keys())
    resized = {key for attachment in attached for key in attachment.resized}
    for key, value in entries.items():
        where = _place_of(collected, path, module, key)
        if not isinstance(value, torch.Tensor):
            collected.leaves[where] = ValueSlot(value, _setter(entries, key))
            copies.append(key)
            continue
        collected.tensors[where] = value
        is_extra = key.rpartition(".")[2] == _EXTRA_STATE or key in resized
        if is_extra or (not _storages([value]) <= memory and value.numel()):
            copies.append(key)
        if is_extra:
            collected.extra_states[where] = _setter(entries, key)
    unknown = (
        entries.keys()
        - _known_keys(module)
        - {key for attachment in attached for key in attachment.keys}
    )
    if unknown and not any(map(_finds_keys, module.modules())):
        collected.unloadable += [
            f"{dotted((*path, key))}: the module's own load_state_dict does not take it"
            for key in sorted(unknown)
        ]
    if copies or any(map(acts_on_load, module.modules())):
        collected.finish.append(lambda: _load_copies(dotted(path), module, entries, copies))


def _place_of(
    collected: CollectedState, path: Path, module: torch.nn.Module, key: str
) -> tuple[str | int, ...]:
    """The path of an entry of a module's state dict."""
    where = (*path, collected.global_names.of(plain_name(module, key)))
    if where in collected.tensors or where in collected.leaves:
        raise UsageError(
            f"two parts of {dotted(path)} have the entry {where[-1]!r}",
            hint="give each layer its number in the whole model as its name",
        )
    return where


def _flat_module(
    collected: CollectedState, path: Path, module: torch.nn.Module
) -> FlatModule | None:
    """The parameters of a module in FSDP1's terms; None if it has nothing of FSDP1."""
    wrapped = any(map(is_fsdp1, module.modules()))
    if not wrapped and not any(map(is_flattened, module.parameters())):
        return None
    if id(module) not in collected.flat_modules:
        collected.flat_modules[id(module)] = FlatModule(dotted(path), module)
    return collected.flat_modules[id(module)]


def _fsdp1(collected: CollectedState, path: Path, flat: FlatModule) -> None:
    """The entries of a module that FSDP1 wraps, all of which are filled where they are."""
    entries, extra = flat.entries(), dict(with_extra_state(flat.module))
    if attached := _attached(flat.module, entries.keys()):
        raise UnsupportedError(
            f"{dotted(path)} has {min(attached[0].keys)} beside a weight, which FSDP1 cuts",
            hint="use fully_shard (FSDP2)",
        )
    for key, value in entries.items():
        where = _place_of(collected, path, flat.module, key)
        if isinstance(value, torch.Tensor | FlatPart):
            collected.tensors[where] = value
        else:
            collected.leaves[where] = ValueSlot(value, _setter(entries, key))
        if key in extra and isinstance(value, torch.Tensor):
            collected.extra_states[where] = _setter(entries, key)
    collected.unloadable += [
        f"{dotted((*path, plain_name(flat.module, name)))} does more in a load than to fill its "
        "tensors, which FSDP1 has cut"
        for name, part in flat.module.named_modules()
        if not is_fsdp1(part) and acts_on_load(part)
    ]

    def load() -> None:
        for key, part in extra.items():
            part.set_extra_state(entries[key])
        flat.filled()

    collected.finish.append(load)


def _check_tensors(path: Path, module: torch.nn.Module) -> None:
    """UsageError if a tensor can be neither saved nor filled, before the state dict detaches it from what it has."""
    plain = (*_PLAIN_TENSORS, dtensor_class())
    for prefix, inner in module.named_modules():
        if type(inner)._save_to_state_dict is torch.nn.Module._save_to_state_dict:  # noqa: SLF001 - else it knows how
            own = [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]
            for name, tensor in own:
                if (
                    type(tensor) not in plain and name not in inner._non_persistent_buffers_set  # noqa: SLF001
                ):
                    _taken_apart(
                        (*path, plain_name(module, f"{prefix}.{name}" if prefix else name)), tensor
                    )


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _known_keys(module: torch.nn.Module) -> set[str]:
    """The keys that `load_state_dict` of a module takes, if neither hooks nor its own loaders find more."""
    out: set[str] = set()
    for prefix, inner in module.named_modules(remove_duplicate=False):
        below = f"{prefix}." if prefix else ""
        out |= {below + name for name in (*inner._parameters, *inner._buffers, _EXTRA_STATE)}  # noqa: SLF001
    return out


def _finds_keys(module: torch.nn.Module) -> bool:
    """Whether a module may find entries of its state dict by other names than those of its tensors."""
    return bool(module._load_state_dict_pre_hooks) or _loads_itself(module)  # noqa: SLF001


def _attached(module: torch.nn.Module, keys: Collection[str]) -> list[AttachedEntries]:
    """The entries of a state dict that libraries keep beside the tensors of modules."""
    return [e for integration in integrations() for e in integration.attached_entries(module, keys)]


def _load_attached(module: torch.nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Set what libraries keep beside the tensors of modules, and return the other entries."""
    others = dict(entries)
    for attached in _attached(module, entries.keys()):
        if attached.keys:
            attached.load({key: others.pop(key) for key in entries if key in attached.keys})
    return others


def acts_on_load(module: torch.nn.Module) -> bool:
    """Check whether a module does more in a load than to fill its tensors: it may make others from them."""
    if module._load_state_dict_post_hooks:  # noqa: SLF001 - there is no public way to tell
        return True
    return _loads_itself(module)


def _loads_itself(module: torch.nn.Module) -> bool:
    loaders = (getattr(type(module), name) for name in ("load_state_dict", "_load_from_state_dict"))
    return any(not loader.__module__.startswith("torch.") for loader in loaders)


_EXTRA_STATE = "_extra_state"


def _storages(tensors: Iterable[torch.Tensor]) -> set[tuple[torch.device, int]]:
    """The memory that tensors refer to; a wrapper refers to that of its inner tensors."""
    out: set[tuple[torch.device, int]] = set()
    for tensor in tensors:
        # what does not even tell its memory is refused by name when it is taken apart
        with suppress(Exception):
            local = memory_of(tensor)
            if is_subclass(local):
                out |= _storages(_inner_tensors(local))
            elif local.layout == torch.strided:
                out.add((local.device, local.untyped_storage().data_ptr()))
    return out


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a wrapper; none if it cannot be taken apart, which is an error later."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten is not None else []


def _load_copies(
    label: str, module: torch.nn.Module, entries: dict[str, Any], copies: list[str]
) -> None:
    """Load what was not filled in place as the module does, and check that the module has it then."""
    extra_only = all(key.rpartition(".")[2] == _EXTRA_STATE for key in copies)
    extra_only = extra_only and not any(map(acts_on_load, module.modules()))
    loaded = {key: entries[key] for key in copies} if extra_only else entries
    expected = {key: value for key in copies if isinstance(value := entries[key], torch.Tensor)}
    kept = {key: [t.clone() for t in _innermost(value)] for key, value in expected.items()}
    try:
        module.load_state_dict(_load_attached(module, loaded), strict=not extra_only)
    except RuntimeError as error:
        raise StateMismatch(
            f"{label}: its load_state_dict does not accept what its state_dict returned: {error}",
            hint=(
                "make the hooks of the module the reverse of each other, or save and load its "
                "parameters as tensors"
            ),
        ) from error
    now = module.state_dict() if kept else {}
    for key, value in kept.items():
        loaded_tensors = _innermost(now[key]) if key in now else []
        if len(loaded_tensors) != len(value) or not all(map(same_bits, loaded_tensors, value)):
            raise StateMismatch(
                f"{label}.{key} is not as it was saved after the module has loaded it: its "
                "state_dict makes this value "
                "from others, and its load_state_dict does not set them back",
                hint="register a load_state_dict pre-hook that reverses the state_dict hook",
            )


def _innermost(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor: itself, or those inside a wrapper."""
    local = memory_of(tensor).detach()
    return (
        [t for inner in _inner_tensors(local) for t in _innermost(inner)]
        if is_subclass(local)
        else [local]
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are alike, and equal bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b))))


def _optimizer(
    collected: CollectedState, path: Path, optimizer: torch.optim.Optimizer, modules: Modules
) -> None:
    local = local_optimizer(dotted(path), optimizer)
    param_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    in_modules = [(p, m, {id(p) for p in m.parameters()} & param_ids) for p, m in modules]
    owners = [candidate for candidate in in_modules if candidate[2] == param_ids][:1] or [
        candidate for candidate in in_modules if candidate[2]
    ]
    lacking = len(param_ids) - len({param_id for *_, ids in owners for param_id in ids})
    if lacking or not owners:
        raise UsageError(
            f"{lacking} of {len(param_ids)} parameters of the optimizer {dotted(path)} are in no "
            "module of the state",
            hint=(
                'pass all models that it trains, each as an entry: {"model": model, '
                '"optimizer": optimizer}'
            ),
        )
    _check_optimizer(dotted(path), local, param_ids)
    collected.owners[path] = owner = _common_path([p for p, *_ in owners])
    names: dict[int, dict[str, FlatSlot | None]] = {}
    for where, module, _ in owners:
        for name, param, slot in _parameters(collected, where, module):
            global_name = collected.global_names.of(plain_name(module, name))
            of_param = names.setdefault(id(param), {})
            if not of_param or (slot is not None and slot.joined):  # of tied ones the first
                of_param[dotted((*where[len(owner) :], global_name))] = slot
    groups: list[CollectedGroup] = []
    params: dict[str, torch.Tensor] = {}
    slots: dict[str, FlatSlot] = {}
    mine = {id(p) for group in local.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        named = [(name, p, slot) for p in group["params"] for name, slot in names[id(p)].items()]
        groups.append(
            CollectedGroup(
                tuple(name for name, *_ in named), GroupOptions(group, ("params", "param_names"))
            )
        )
        slots |= {name: slot for name, _, slot in named if slot is not None}
        params |= {
            name: p for name, p, slot in named if id(p) in mine and (slot is None or slot.optimized)
        }
    collected.groups.setdefault(path, []).extend(groups)
    collected.optimizers.setdefault(path, []).append(LiveOptimizer(local, groups, params, slots))
    for name, param in params.items():
        states = local.state.get(param, {})
        check_local_states(dotted((*path, "state", name)), param, states)
        collect_states(collected, (*path, "state", name), states, slots.get(name))
    if local is not optimizer:
        collected.finish.append(partial(adopt_groups, optimizer))


def _parameters(
    collected: CollectedState, path: Path, module: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor, FlatSlot | None]]:
    """The names of a module's parameters, with what an optimizer has for each, and where it is in that."""
    flat = _flat_module(collected, path, module)
    if flat is not None:
        yield from flat.parameters()
    else:
        yield from ((name, param, None) for name, param in module.named_parameters())


def _common_path(paths: Sequence[Path]) -> Path:
    """The path of what contains all paths, or is the only one."""
    first = paths[0]
    return first[
        : next(
            (i for i in range(len(first)) if any(p[i : i + 1] != first[i : i + 1] for p in paths)),
            None,
        )
    ]


def _check_optimizer(label: str, optimizer: torch.optim.Optimizer, params: set[int]) -> None:
    """UnsupportedError if an optimizer has state that belongs to none of its parameters."""
    kind = type(optimizer).__name__
    hint = f'save its state dict, {{"{label}": optimizer.state_dict()}}, or what it has beside the states of parameters'
    odd = [key for key in optimizer.state if id(key) not in params]
    if odd:
        key_text = "a tensor" if isinstance(odd[0], torch.Tensor) else repr(odd[0])
        raise UnsupportedError(
            f"{label}: {kind} has a state of {key_text}, which is none of its parameters", hint=hint
        )
    hooks = optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001 - there is no public way to tell
    if hooks or type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        entries = [key for key in optimizer.state_dict() if key not in ("state", GROUPS)]
        if entries:
            raise UnsupportedError(
                f"{label}: the state dict of {kind} has the entry {entries[0]!r}", hint=hint
            )


def collect_states(
    collected: CollectedState, path: Path, states: Mapping[str, Any], slot: FlatSlot | None = None
) -> None:
    """Collect the states of one parameter, which an optimizer has or would have.

    Args:
        slot: where the parameter is in what the optimizer has, if FSDP1 cuts it.
    """
    if not states:
        return
    tensors, leaves = len(collected.tensors), len(collected.leaves)
    _walk(collected, path, states, [])
    if slot is None:
        return
    for where in [*collected.tensors][tensors:]:
        collected.tensors[where] = slot.state(dotted(where), collected.tensors[where])
    if slot.joined and (values := [*collected.leaves][leaves:]):
        raise UnsupportedError(
            f"{dotted(values[0])} is no tensor, and the optimizer has one value for all parameters "
            "that FSDP1 joins",
            hint="wrap with use_orig_params=True",
        )


def collect_made(
    collected: CollectedState,
    path: Path,
    name: str,
    states: Mapping[str, Any],
    slot: FlatSlot | None = None,
) -> list[Path]:
    """Add the states that an optimizer would have of a parameter to a state that is collected; returns their paths."""
    new = CollectedState()
    collect_states(new, path, states, slot)
    new.keys = {p: Key(name, dotted(p[len(path) :])) for p in new.tensors}
    replace_wrappers(
        new, {p: t for p, value in new.tensors.items() if (t := _taken_apart(p, value)) is not None}
    )
    collected.tensors |= new.tensors
    collected.leaves |= new.leaves
    collected.keys |= new.keys
    collected.wrappers |= new.wrappers
    collected.wrapper_of |= new.wrapper_of
    collected.finish += new.finish
    return [*new.tensors, *new.leaves]
