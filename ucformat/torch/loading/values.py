"""Finds the objects and optimizer groups of a checkpoint by the paths of a training state, and restores them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from operator import setitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ucformat.errors import PermissionDenied, UnsupportedError, UsageError, option_text
from ucformat.format.digest import document_digest
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import IntKey, json_key
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.reading.values import from_json, is_flattened, is_special, without_class
from ucformat.torch.loading.match import PARAMETER, Problems
from ucformat.torch.state.collect import NoPlace, ValueSlot
from ucformat.torch.state.memory import dtype_name, torch_dtype
from ucformat.torch.state.objects import Rng, decode, encode, unfit
from ucformat.torch.state.subclasses import RECORD, check_live

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.readable import GroupPlace
    from ucformat.reading.readable import StatePath as Path
    from ucformat.schema.manifest import GroupDoc
    from ucformat.torch.comm.group import Group as Ranks
    from ucformat.torch.state.collect import CollectedState
    from ucformat.torch.state.groups import CollectedGroup
    from ucformat.torch.state.local import LocalShard
    from ucformat.torch.state.objects import PerRank
    from ucformat.torch.state.subclasses import TakenApart

ABSENT = object()


class SavedState:
    """What a checkpoint records of the state that was saved; `tensors` are keyed by their dotted paths."""

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.unrenamed = {n: n for n in ck.names()} | dict(ck.aliases)
        self.tensors: dict[str, Key] = {}
        self.paths: dict[str, Path] = {}
        for key, paths in ck.metadata.paths.items():
            if names.get(key.name) == key.name:
                for path in paths:
                    text = dotted(path)
                    self.paths[text], self.tensors[text] = path, key

    def stored(self, key: Key) -> Key:
        """Return the key in the checkpoint of a tensor of the state."""
        return key._replace(name=self.names.get(key.name, key.name))

    @cached_property
    def optimizers(self) -> dict[str, list[tuple[GroupDoc, GroupPlace]]]:
        """The groups of each optimizer, by its dotted path."""
        groups = self.ck.manifest.groups
        out: dict[str, list[tuple[GroupDoc, GroupPlace]]] = {}
        for group, place in zip(
            groups, self.ck.metadata.places or (None,) * len(groups), strict=True
        ):
            if place is not None:
                out.setdefault(dotted(place.path), []).append((group, place))
        return out

    def find_group(self, root: str, prefix: str = "") -> Callable[[str], GroupDoc | None]:
        """Return a function that finds the stored group of a parameter."""
        own_groups = {
            name: group
            for group, place in self.optimizers.get(root, ())
            for name, param in zip(place.names, group.params, strict=True)
            if self.names.get(param, param) == param
        }
        stored = {p: g for g in self.ck.manifest.groups for p in g.params}
        return lambda name: (
            own_groups.get(name) or stored.get(self.names.get(prefix + name, prefix + name))
        )

    def value(self, path: Path) -> Any:
        """Return the JSON form of a value, or of hyper-parameters; `ABSENT` if there is none."""
        value = find_object(self.ck.objects, path)
        return value if value is not ABSENT else self._of_groups(dotted(path))

    def _of_groups(self, text: str) -> Any:
        """The groups of an optimizer, or a part of them, as in the state that was saved."""
        for root, groups in self.optimizers.items():
            below = text.removeprefix(f"{root}.") if root else text
            if not below.startswith(GROUPS) or (root and below == text):
                continue
            as_saved: dict[str, Any] = {}
            for group, place in groups:
                options = {k: v for k, v in group.options.items() if k != "state"}
                if place.flattened:
                    as_saved |= {
                        f"{GROUPS}.{n}.{o}": v for n in place.names for o, v in options.items()
                    }
                else:
                    as_saved.setdefault(GROUPS, []).append({"params": list(place.names), **options})
            if (value := value_at(as_saved, below)) is not ABSENT:
                return value
        return ABSENT

    def other_wrapper(
        self, path: Path, keys: Mapping[tuple[str, ...], Key], contents: TakenApart
    ) -> str | None:
        """Say how a wrapper of the state differs from the one that was saved; None if it does not."""
        places = [path]
        for names, key in keys.items():
            recorded_paths = self.ck.metadata.paths.get(self.stored(key), ())
            places += [
                p[: len(p) - len(names)]
                for p in recorded_paths
                if p[len(p) - len(names) :] == names
            ]
            # all tensors inside a wrapper lie below the same paths
            break
        for names, record in contents.records.items():
            records = (find_object(self.ck.objects, (*place, *names, RECORD)) for place in places)
            data = next((d for d in records if d is not ABSENT), ABSENT)
            inside = f"its {'.'.join(names)} " if names else ""
            if data is ABSENT:
                return f"{inside}is a {record['class']}, in the checkpoint it is not"
            saved = from_json(data)
            # `repr` too, since 1 equals 1.0 and True
            if saved != record or repr(saved) != repr(dict(record)):
                parts = [
                    k for k in record if not isinstance(saved, dict) or saved.get(k) != record[k]
                ] or ["context"]
                in_state, in_checkpoint = (
                    [_shown(r, part) for part in parts] for r in (record, saved)
                )
                return (
                    f"{inside}is a wrapper with {', '.join(in_state)}, in the checkpoint with "
                    f"{', '.join(in_checkpoint)}"
                )
        return None

    def holds_tensors(self, text: str) -> bool:
        """Check whether tensors were stored separately from the value that contained them."""
        return any(name.startswith(f"{text}.") for name in self.tensors)

    def entries(self) -> Iterator[Path]:
        """Yield the paths of all values that DCP would save as separate entries."""
        yield from self.paths.values()
        for groups in self.optimizers.values():
            for number, (group, place) in enumerate(groups):
                if place.flattened:
                    yield from (
                        (*place.path, f"{GROUPS}.{n}.{o}")
                        for n in place.names
                        for o in group.options
                    )
                    continue
                yield (*place.path, GROUPS, number, "params")
                for path in _leaves(
                    {k: v for k, v in group.options.items() if k != "state"}, (), set()
                ):
                    yield (*place.path, GROUPS, number, *path)
        yield from self.value_paths

    @cached_property
    def value_paths(self) -> list[Path]:
        """The paths of the plain values, except hyper-parameters of optimizers."""
        lists = {
            dotted(p[:i])
            for p in self.paths.values()
            for i, part in enumerate(p)
            if type(part) is int
        }
        return list(_leaves(self.ck.objects, (), lists))


def plain_states(ck: Checkpoint) -> dict[str, dict[str, Any]]:
    """The states of parameters that are plain numbers beside hyper-parameters, by stored name and state.

    Megatron-Core and fused optimizers have one step for a group, which is that of each of its
    parameters that has other states.
    """
    plain: dict[str, dict[str, Any]] = {}
    for group in ck.manifest.groups:
        for state, value in (group.options.get("state") or {}).items():
            by_name = value if isinstance(value, Mapping) else dict.fromkeys(group.params, value)
            for name, number in by_name.items():
                plain.setdefault(name, {})[state] = number
        if not isinstance(step := group.options.get("step"), int | float):
            continue
        for name in group.params:
            states = ck.states(name)
            if "step" not in states and any(state not in PARAMETER for state in states):
                plain.setdefault(name, {}).setdefault("step", step)
    return plain


def _shown(record: Any, part: str) -> str:
    return f"{part} {record.get(part) if isinstance(record, Mapping) else record}"


def find_object(objects: Mapping[str, Any], path: Path) -> Any:
    """Return the JSON form of an object; `ABSENT` if there is none."""
    data: Any = objects
    for part in path:
        key = json_key(part)
        if not isinstance(data, Mapping) or key not in data:
            return value_at(objects, dotted(path))
        data = data[key]
    return data


def value_at(node: Any, text: str) -> Any:
    """Return the JSON form of the value at a dotted path; `ABSENT` if there is none."""
    # a key may contain dots, so the text is split at each of them in turn
    at = -1
    while at < len(text):
        at = text.find(".", at + 1)
        at = len(text) if at < 0 else at
        inner = _item(node, text[:at])
        if inner is not ABSENT:
            value = inner if at == len(text) else value_at(inner, text[at + 1 :])
            if value is not ABSENT:
                return value
    return ABSENT


def _item(node: Any, part: str) -> Any:
    node = without_class(node)
    if isinstance(node, Mapping) and set(node) in ({"$tuple"}, {"$packed"}):
        (node,) = node.values()
    if isinstance(node, list):
        return node[int(part)] if part.isdecimal() and int(part) < len(node) else ABSENT
    if not isinstance(node, Mapping):
        return ABSENT
    if set(node) == {"$dict"}:
        return next((value for key, value in node["$dict"] if str(from_json(key)) == part), ABSENT)
    if is_special(node):
        return ABSENT
    keys = (json_key(part), f"$int:{part}")
    return next((node[k] for k in keys if k in node), ABSENT)


def _leaves(node: Any, path: Path, lists: set[str]) -> Iterator[Path]:
    """The paths of plain values as DCP flattens a state: lists are flattened only if they contain dictionaries.

    `lists` are the paths of lists from which tensors were stored separately.
    """
    node = without_class(node)
    if isinstance(node, Mapping) and set(node) == {"$dict"}:
        for key, inner in node["$dict"]:
            yield from _leaves(inner, (*path, str(from_json(key))), lists)
    elif isinstance(node, Mapping) and not is_special(node):
        for key, inner in node.items():
            number = key.removeprefix("$int:")
            in_list = number != key and dotted(path) in lists
            part = (
                int(number)
                if in_list
                else str(IntKey(number))
                if number != key
                else key.removeprefix("$")
            )
            yield from _leaves(inner, (*path, part), lists)
    elif isinstance(node, list) and is_flattened(node):
        for i, inner in enumerate(node):
            yield from _leaves(inner, (*path, i), lists)
    else:
        yield path


class FittedValue(NamedTuple):
    """A plain value of a state as it is now, as it was saved, and what sets it; None: nothing here.

    `settled` is what it is after that.
    """

    label: str
    current: Any
    saved: Any
    put: Callable[[Any], None] | None
    settled: Any


class FittedValues:
    """The values of a state that fit, and lines for what does not."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.left: list[str] = []
        self.dtypes: list[str] = []
        self.others: list[str] = []
        self.inexact: list[str] = []
        self.values: list[FittedValue] = []

    @contextmanager
    def decoding(self, label: str) -> Iterator[list[str]]:
        """Decode values inside, which add the classes that they lose; an error is one of `others`."""
        lost: list[str] = []
        try:
            yield lost
        except (PermissionDenied, UnsupportedError) as error:
            self.others.append(f"{label}: {error.message}")
        else:
            self.inexact += [f"{label}: it was saved as a {name}" for name in lost]

    def fit(self, label: str, slot: ValueSlot, saved: Any, settled: Any = ABSENT) -> None:
        """Add a value; `settled` is what it is when it is set, if not `saved`."""
        settled = saved if settled is ABSENT else settled
        self.values.append(FittedValue(label, slot.value, saved, slot.put, settled))

    def compare(self, label: str, current: Any, saved: Any) -> None:
        """Add a value that is not set here."""
        self.values.append(FittedValue(label, current, saved, None, saved))

    def common_options(
        self, label: str, names: Sequence[str], saved: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """The hyper-parameters that the parameters of a group were saved with; none, and told, if they lack or differ.

        Args:
            names: of the parameters.
            saved: the hyper-parameters of each parameter that was in a group.
        """
        if names and not saved:
            self.missing.append(f"{label}: the hyper-parameters of {', '.join(names[:3])}")
        if not saved:
            return {}
        differing = sorted({k for of_one in saved for k in of_one if of_one[k] != saved[0].get(k)})
        if differing:
            keys = ", ".join(differing)
            self.others.append(f"{label}: its parameters were in groups with different {keys}")
            return {}
        return saved[0]

    def problems(self) -> Problems:
        """What does not fit, each line once."""
        lines = (self.missing, self.left, (), self.dtypes, self.others, self.inexact)
        return Problems(*(tuple(dict.fromkeys(of_kind)) for of_kind in lines))

    def put(self) -> None:
        """Set all that fits."""
        for value in self.values:
            if value.put is not None:
                value.put(value.saved)

    def different(self) -> Iterator[tuple[str, str]]:
        """The labels of values that are not as they were saved, and how they differ."""
        for value in self.values:
            if not _is_same(value.current, value.settled):
                now, then = repr(value.current), repr(value.settled)
                short = max(len(now), len(then)) <= _SHOWN_VALUE and now != then
                yield (
                    value.label,
                    f"it is {now}, and was saved as {then}" if short else "it differs",
                )


_SHOWN_VALUE = 60  # characters of a value in a message, at most


def _is_same(current: Any, saved: Any) -> bool:
    """Whether two values would be saved alike."""
    return document_digest(encode(current)) == document_digest(encode(saved))


def fit_objects(
    collected: CollectedState,
    recorded: SavedState,
    ranks: Ranks,
    *,
    trust: bool,
    cast: bool = False,
) -> FittedValues:
    """Match plain values with stored objects."""
    fit = FittedValues()
    for path, leaf in collected.leaves.items():
        label = f"the object {dotted(path)}"
        data = with_empty(recorded.value(path), leaf.value)
        if data is ABSENT:
            fit.missing.append(label)
            continue
        value = ABSENT
        with fit.decoding(label) as lost:
            value = decode(data, leaf.value, trust=trust, lost=lost)
        if value is ABSENT:
            continue
        if isinstance(leaf.put, NoPlace):
            fit.others.append(f"the object {leaf.put.why}")
            continue
        misfits, dtype = unfit(value, leaf.value, cast=cast)
        fit.others += [f"{label}: {w}" for w in misfits]
        fit.dtypes += [f"{label} is {d}" for d in dtype]
        if not misfits and not dtype:
            fit.fit(label, leaf, value)
    _fit_ranks(fit, collected, recorded.ck.per_rank, ranks, trust=trust)
    return fit


def _fit_ranks(
    fit: FittedValues,
    collected: CollectedState,
    per_rank: Mapping[str, Sequence[Any]],
    ranks: Ranks,
    *,
    trust: bool,
) -> None:
    """The same for per-rank values."""
    for path, (declared, leaf) in collected.ranks.items():
        label = f"the per-rank value {dotted(path)}"
        saved = per_rank.get(dotted(path))
        if saved is None:
            fit.missing.append(label)
            continue
        if len(saved) != ranks.size and declared.merge is None:
            fit.others.append(_no_merge(path, declared, len(saved), ranks.size))
            continue
        value = ABSENT
        with fit.decoding(label) as lost:
            if declared.merge is None or len(saved) == ranks.size:  # those of others are not read
                value = decode(saved[ranks.rank], leaf.value, trust=trust, lost=lost)
            else:
                values = [decode(v, leaf.value, trust=trust, lost=lost) for v in saved]
                value = declared.merge(values, ranks.rank, ranks.size)
        if value is ABSENT:
            continue
        settled = value
        try:
            if isinstance(declared.value, Rng):
                settled = declared.value.settled(value)
        except UsageError as error:
            fit.others.append(f"{dotted(path)}: {error.message}; {error.hint}")
            continue
        fit.fit(label, leaf, value, settled)


_DEALT = "; deal_evenly if a distributed sampler deals one order to all ranks"


def _no_merge(path: Path, declared: PerRank, saved: int, now: int) -> str:
    kind = type(declared.value).__name__
    return (
        f"{dotted(path)} ({kind}) has a value of each of {saved} ranks, and is loaded by {now}: "
        "pass "
        f"{declared.call}=function of all values, the rank and the number of ranks"
        f"{_DEALT if kind == 'StatefulDataLoader' else ''}), or leave it out of the state "
        "and read ckpt.per_rank"
    )


def fit_wrappers(collected: CollectedState, recorded: SavedState) -> Problems:
    """Match the wrappers of a state with those that were saved, and leave out those that do not fit."""
    problems: list[str] = []
    for path, (tensor, contents) in collected.wrappers.items():
        check_live(dotted(path), tensor, contents)
        keys = {names: collected.keys[*path, *names] for names in contents.tensors}
        difference = recorded.other_wrapper(path, keys, contents)
        if difference is not None:
            problems.append(f"{dotted(path)} {difference}")
            for names in contents.tensors:
                del collected.tensors[*path, *names], collected.keys[*path, *names]
    return Problems(others=tuple(problems))


def take_values(collected: CollectedState, recorded: SavedState) -> None:
    """Treat tensors that the checkpoint stores inside a value, as DCP does in tuples, as plain values of the state."""
    for path, tensor in list(collected.tensors.items()):
        if dotted(path) in recorded.tensors or collected.keys[path].name in recorded.names:
            continue
        if path in collected.wrapper_of:
            continue
        data = recorded.value(path)
        if type(tensor) is torch.Tensor and isinstance(data, dict) and set(data) == {"$tensor"}:
            collected.leaves[path] = ValueSlot(tensor, tensor.copy_)
            del collected.tensors[path]


def resize_extra_states(collected: CollectedState, recorded: SavedState) -> None:
    """Give the extra states of modules, which are loaded as a whole, the shapes and dtypes that were saved."""
    for path, put in collected.extra_states.items():
        key, tensor = collected.keys.get(path, Key("", "")), collected.tensors.get(path)
        stored = recorded.ck.tensors.get(recorded.stored(key))
        if stored is None or tensor is None:
            continue
        if tuple(tensor.shape) != stored.shape or dtype_name(tensor.dtype) != stored.dtype:
            collected.tensors[path] = torch.empty(
                stored.shape, dtype=torch_dtype(stored.dtype), device=tensor.device
            )
            put(collected.tensors[path])


def with_empty(data: Any, template: Any) -> Any:
    """The JSON form of a value, with the empty dictionaries of the template, which DCP does not save."""
    if _is_empty(template) and data is ABSENT:
        return encode(template)
    if isinstance(template, dict) and isinstance(data, dict) and not is_special(data):
        by_key = {json_key(k): v for k, v in template.items() if isinstance(k, str | int)}
        new = {k: with_empty(data.get(k, ABSENT), v) for k, v in by_key.items()}
        return data | {k: v for k, v in new.items() if v is not ABSENT}
    if isinstance(template, list) and isinstance(data, list):
        at = (data[i] if i < len(data) else ABSENT for i in range(max(len(data), len(template))))
        items = (
            with_empty(d, template[i] if i < len(template) else None) for i, d in enumerate(at)
        )
        return [d for d in items if d is not ABSENT]
    return data


def _is_empty(value: Any) -> bool:
    """Whether DCP saves nothing of a value."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, dict | list) and _is_empty(v) for v in value)
    return isinstance(value, dict) and all(map(_is_empty, value.values()))


def fit_groups(
    collected: CollectedState,
    recorded: SavedState,
    may_leave: Callable[[str], bool] = lambda _: False,
    *,
    trust: bool = False,
) -> FittedValues:
    """Match the optimizer groups of a state with stored hyper-parameters, by the names of the parameters.

    If some parameters of a group are not stored, the hyper-parameters of the others apply. A group
    without parameters has those of the group with its number, if as many were saved. Of groups that
    are one here, what differs is left if it is no hyper-parameter of the group, as an engine's marks.
    """
    fit = FittedValues()

    def fit_group(
        label: str,
        text: str,
        group: CollectedGroup,
        doc: GroupDoc,
        saved: Sequence[GroupDoc],
        differing: Collection[str] = (),
    ) -> None:
        """Give a group what was saved of a group, of which some belong to the same optimizer."""
        settable = _settable(group, doc, saved)
        options = {key: value for key, value in settable.items() if key not in differing}
        if doc in saved:
            fit.left.extend(
                f"the hyper-parameter {key} of {label}"
                for key in sorted(doc.options.keys() - options.keys() - {*_NO_OPTIONS})
                if not may_leave(f"{text}.{key}")
            )
            fit.inexact.extend(
                f"the hyper-parameter {key} of {label} was not saved, and stays as it is"
                for key in sorted(group.options.keys() - doc.options.keys() - {*_NO_OPTIONS})
            )
        with fit.decoding(f"a hyper-parameter of {label}") as lost:
            values = {
                key: decode(value, group.options.get(key), trust=trust, lost=lost)
                for key, value in options.items()
            }
            for key, value in values.items():
                slot = ValueSlot(group.options.get(key), partial(setitem, group.options, key))
                fit.fit(f"the hyper-parameter {key} of {label}", slot, value)

    for path, groups in collected.groups.items():
        root = dotted(path)
        group_of = recorded.find_group(root, collected.prefixes.get(path, ""))
        saved = [group for group, _ in recorded.optimizers.get(root, ())]
        for number, group in enumerate(groups):
            label, text = f"group {number} of {root}", f"{root}.{GROUPS}.{number}"
            lacking = sorted(p for p in group.params if group_of(p) is None)
            if lacking:
                _add_lacking(fit, recorded, root, label, lacking)
            if not group.params and len(saved) == len(groups):
                fit_group(label, text, group, saved[number], saved)
            elif not group.params and saved:
                fit.missing.append(
                    f"{label}: its hyper-parameters; it has no parameters, and {len(saved)} "
                    "groups were saved"
                )
            for part in group.parts():
                saved_in = (g for p in part.params if (g := group_of(p)) is not None)
                docs = [*{id(g): g for g in saved_in}.values()]
                differing = _differing([doc.options for doc in docs])
                if conflicts := differing & group.options.keys():
                    fit.others.append(
                        f"{label}: its parameters were in groups with different hyper-parameters"
                        f" ({', '.join(sorted(conflicts))})"
                    )
                elif docs:
                    fit_group(label, text, part, docs[0], saved, differing)
    return fit


def fit_plain_states(
    targets: Sequence[LocalShard], ck: Checkpoint, names: Mapping[str, str]
) -> tuple[list[LocalShard], FittedValues]:
    """Match states that are tensors without dims here, and plain numbers in the checkpoint.

    Args:
        names: those in the checkpoint.

    Returns:
        the other targets, and the numbers.
    """
    fit, others = FittedValues(), []
    plain = plain_states(ck)
    for target in targets:
        name, state = target.key
        stored = Key(names.get(name, name), state)
        saved = plain.get(stored.name, {}).get(state)
        if target.info.shape or saved is None or stored in ck.tensors:
            others.append(target)
            continue
        tensor, number = target.tensor, decode(saved)
        # in the dtype that it has here: a step may be 3 there, and 3.0 here
        as_here = torch.tensor(number).to(tensor.dtype).item()
        settled = as_here if as_here == number else number
        fit.fit(str(target.key), ValueSlot(tensor.item(), tensor.fill_), number, settled)
    return others, fit


def _add_lacking(
    fit: FittedValues, recorded: SavedState, root: str, label: str, lacking: Sequence[str]
) -> None:
    """Add a line for parameters of a group that no stored group has."""
    stored = (p for group in recorded.ck.manifest.groups for p in group.params)
    if any(p.removeprefix(f"{root}.").isdigit() for p in stored):
        fit.others.append(
            f"{label}: its parameters have numbers in the checkpoint, which does not tell which "
            f"they are: {option_text('groups')}"
        )
    else:
        fit.missing.append(f"{label}: the hyper-parameters of {', '.join(lacking[:3])}")


def _differing(options: Sequence[Mapping[str, Any]]) -> set[str]:
    """The hyper-parameters in which groups differ."""
    first = options[0] if options else {}
    return {
        key
        for other in options[1:]
        for key in first.keys() | other.keys()
        if first.get(key, ABSENT) != other.get(key, ABSENT)
    }


_NO_OPTIONS = ("param_names", "state")  # entries of stored groups that are no hyper-parameters


def _settable(
    group: CollectedGroup, saved: GroupDoc, recorded: Sequence[GroupDoc]
) -> dict[str, Any]:
    """The stored hyper-parameters that a group takes.

    As in PyTorch, an optimizer takes all that an optimizer has saved; of those of an engine it
    takes what it has itself. A flattened state dict has an entry for each, and takes no others.
    """
    is_optimizers = any(saved is doc for doc in recorded)
    return {
        key: value
        for key, value in saved.options.items()
        if key not in _NO_OPTIONS
        and (
            key in group.options or (not group.flattened and (is_optimizers or key == "initial_lr"))
        )
    }
