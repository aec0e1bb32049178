"""From the entries of a DCP checkpoint to names: which is a weight, which an optimizer's state, and of which group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UsageError, option_text
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Key
from ucformat.sources.dcp.names import GROUPS, Naming, dotted, name_state, optimizer_roots, split_option, split_state
from ucformat.sources.pickle.optimizer import Entry, Module, shape_of_states
from ucformat.sources.pickle.stand_ins import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.sources.dcp.metadata import Metadata
    from ucformat.sources.dcp.names import Path

__all__ = ["Named", "Optimizer", "name_entries"]

Numbers = dict[str, str]


@dataclass(slots=True)
class Optimizer:
    """One optimizer: where it lies, its group entries, and what its names are called in the checkpoint."""

    root: Path
    options: dict[str, Path] = field(default_factory=dict)  # group entries: the path below the root
    plain: dict[str, Key] = field(default_factory=dict)  # states that are no tensors
    prefix: str = ""
    numbers: Numbers | None = None  # number -> name, where entries are numbered
    known: frozenset[str] = frozenset()  # names of parameters, which may hold dots

    def name(self, entry: Any) -> str:
        """The name of a parameter that a group lists; IntegrityError where it lists what it cannot."""
        if self.numbers is not None and str(entry) in self.numbers:
            return self.numbers[str(entry)]
        if not isinstance(entry, str):
            raise IntegrityError(f"a group of the optimizer {dotted(self.root)} lists the parameter {entry!r}")
        return self.prefix + entry


@dataclass(slots=True)
class Named:
    """All entries, sorted out: tensors by name and state, optimizers, and the paths of other values."""

    tensors: dict[Key, str]
    optimizers: list[Optimizer]
    values: dict[str, Path]


def name_entries(
    meta: Metadata,
    groups_of: Callable[[Optimizer], list[dict[str, Any]]],
    given: Sequence[Sequence[str]] | None = None,
    owners: Mapping[str, str] | None = None,
) -> Named:
    """Name every entry.

    `groups_of` reads an optimizer's groups (with `params` as the file has them): called only where its entries are
    numbered. `given` are the names of each group's parameters for that case.
    """
    paths = _paths(meta)
    optimizers = [Optimizer(root) for root in sorted(optimizer_roots(paths.values()), key=len, reverse=True)]
    order = {path: i for i, path in reversed(list(enumerate(paths.values())))}
    optimizers.sort(key=lambda o: (-len(o.root), min(i for p, i in order.items() if p[: len(o.root)] == o.root)))
    tensors, values = _sort_out(meta, paths, optimizers)
    naming = _naming(meta, optimizers, tensors, paths, owners)
    keys = naming.keys
    for optimizer in optimizers:
        optimizer.prefix = naming.prefixes[optimizer.root]
    _numbered(meta, optimizers, tensors, keys, groups_of, given)
    _plain_states(optimizers, values, keys)
    out: dict[Key, str] = {}
    for fqn, path in tensors.items():
        if (other := out.setdefault(keys[path], fqn)) != fqn:
            raise UsageError(
                f"{meta.file}: {other} and {fqn} would both be {keys[path]}",
                hint=f"say which model each optimizer trains: {option_text('owners')}",
            )
    return Named(out, sorted(optimizers, key=lambda o: min((order[paths[f]] for f in o.options), default=0)), values)


def _paths(meta: Metadata) -> dict[str, Path]:
    """The path of each entry; where the planner kept none, as its dots and `param_groups` tell."""
    fqns = [*meta.tensors, *meta.values]
    bare = [f for f in fqns if f not in meta.paths]
    out: dict[str, Path] = {f: meta.paths[f] for f in fqns if f in meta.paths}
    roots = {f[: at - 1] for f in bare if (at := f.find("." + GROUPS) + 1)} | {"" for f in bare if f.startswith(GROUPS)}
    for fqn in bare:
        root = next((r for r in roots if r and fqn.startswith(r + ".")), None)
        out[fqn] = (root, fqn[len(root) + 1 :]) if root is not None else (fqn,)
    order = {f: i for i, f in enumerate(meta.paths)}
    return dict(sorted(out.items(), key=lambda item: order.get(item[0], len(order))))


def _sort_out(
    meta: Metadata, paths: Mapping[str, Path], optimizers: Iterable[Optimizer]
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Tensors, and values, that are no part of an optimizer's groups; those go to the optimizers."""
    tensors: dict[str, Path] = {}
    values: dict[str, Path] = {}
    roots = {o.root: o for o in optimizers}
    for fqn, path in paths.items():
        at = next((i for i, p in enumerate(path) if isinstance(p, str) and (p + ".").startswith(GROUPS + ".")), None)
        if at is not None and path[:at] in roots:
            roots[path[:at]].options[fqn] = path[at:]
    for optimizer in roots.values():
        if not _are_groups(optimizer, meta):
            optimizer.options.clear()
    options = {fqn for o in roots.values() for fqn in o.options}
    for fqn, path in paths.items():
        if fqn not in options:
            (tensors if fqn in meta.tensors else values)[fqn] = path
    return tensors, values


def _are_groups(optimizer: Optimizer, meta: Metadata) -> bool:
    """Whether the entries are those of groups, and nothing else; one value may be."""
    options = optimizer.options
    if all(len(below) == 1 and below[0] != GROUPS for below in options.values()):
        return all(all(split_option(str(below[0]))) for below in options.values())
    if list(options.values()) == [(GROUPS,)]:  # one value, as PyTorch 2.3 and before keep them
        return not options.keys() & meta.tensors.keys()
    at = {below[1] for below in options.values() if len(below) == 3 and below[2] == "params"}
    return at == set(range(len(at))) and all(len(b) >= 3 and b[0] == GROUPS and b[1] in at for b in options.values())


def _number(path: Path, optimizer: Optimizer) -> str | None:
    """Of `state.7.exp_avg` below an optimizer the 7."""
    below = path[len(optimizer.root) :] if path[: len(optimizer.root)] == optimizer.root else ()
    if len(below) >= 3 and below[0] == "state" and str(below[1]).isdigit():
        return str(below[1])
    return None


def _naming(
    meta: Metadata,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Path],
    paths: Mapping[str, Path],
    owners: Mapping[str, str] | None,
) -> Naming:
    """Names of weights and states, but for those that are numbered; what the optimizers' groups name is noted."""
    leaves = {str(p[-1]) for p in tensors.values()}
    for optimizer in optimizers:
        names = set()
        for below in optimizer.options.values():  # flattened: `param_groups.<name>.lr`
            text = str(below[0])[len(GROUPS) + 1 :]
            if len(below) == 1 and text and (split := split_state(text, leaves)) and not split[0].isdigit():
                names.add(split[0])
        optimizer.known = frozenset(names)
    places = {dotted(p[:i]): p[:i] for p in paths.values() for i in range(len(p))}
    for root, model in (owners or {}).items():
        if root not in places or model not in places:
            raise UsageError(
                f"{meta.file}: there is no {root if root not in places else model!r}, of which `owners` speaks",
                hint="owners={the optimizer's path: its model's path}, both joined by dots",
            )
    return name_state(
        {path: meta.tensors[fqn].shape for fqn, path in tensors.items()},
        [o.root for o in optimizers],
        {places[root]: places[model] for root, model in (owners or {}).items()},
        {o.root: o.known for o in optimizers},
    )


def _numbered(
    meta: Metadata,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Path],
    keys: dict[Path, Key],
    groups_of: Callable[[Optimizer], list[dict[str, Any]]],
    given: Sequence[Sequence[str]] | None,
) -> None:
    """Name what plain `optimizer.state_dict()` numbers."""
    weights = {keys[p].name: meta.tensors[f] for f, p in tensors.items() if keys[p].state == "weight"}
    left = None if given is None else list(given)
    for optimizer in optimizers:
        states: dict[str, dict[str, StoredTensor]] = {}
        mine: dict[Path, tuple[str, str]] = {}
        for fqn, path in tensors.items():
            number = _number(path, optimizer)
            if number is not None:
                state, entry = dotted(path[len(optimizer.root) + 2 :]), meta.tensors[fqn]
                states.setdefault(number, {})[state] = _stand_in(entry.dtype, entry.shape)
                mine[path] = (number, state)
                weights.pop(keys[path].name, None)
        if not mine:
            continue
        groups = groups_of(optimizer)
        numbers = [list(map(str, g.get("params") or ())) for g in groups]
        told = [list(map(str, g.get("param_names") or ())) for g in groups]
        if left is not None:
            told, left = [list(g) for g in left[: len(groups)]], left[len(groups) :]
        module = Module.of({n: (e.dtype, e.shape) for n, e in weights.items()}, ordered=bool(meta.paths))
        entries = [[Entry(shape_of_states(states.get(n, {}))) for n in group] for group in numbers]
        names = told if [len(g) for g in told] == [len(g) for g in numbers] else module.match(entries)
        if names is None or (left is not None and names is not told):
            raise _unnamed(meta, optimizer, numbers, given is not None)
        optimizer.numbers = {n: name for a, b in zip(numbers, names, strict=True) for n, name in zip(a, b, strict=True)}
        if any(number not in optimizer.numbers for number, _ in mine.values()):
            raise IntegrityError(
                f"{meta.file}: {dotted(optimizer.root)} has states of parameters in none of its groups"
            )
        keys |= {path: Key(optimizer.numbers[number], state) for path, (number, state) in mine.items()}


def _stand_in(dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor("", dtype, shape, row_major(shape), 0, 0)


def _unnamed(meta: Metadata, optimizer: Optimizer, numbers: Sequence[Sequence[str]], given: bool) -> UsageError:  # noqa: FBT001
    where, sizes = dotted(optimizer.root) or "the optimizer", [len(g) for g in numbers]
    if given:
        return UsageError(f"{meta.file}: the names that were given are not those of groups of {sizes} parameters")
    return UsageError(
        f"{meta.file}: the states of {where} are numbered ({sizes} parameters by group), and which parameters the "
        "numbers mean cannot be told for certain from their shapes and the order of the model",
        hint=f"name them: {option_text('groups')}",
    )


def _plain_states(optimizers: Sequence[Optimizer], values: dict[str, Path], keys: Mapping[Path, Key]) -> None:
    """Tell the optimizers of their states that are no tensors."""
    for optimizer in optimizers:
        names = {k.name.removeprefix(optimizer.prefix) for k in keys.values()}
        for fqn, path in values.items():
            below = path[len(optimizer.root) :] if path[: len(optimizer.root)] == optimizer.root else ()
            if len(below) >= 3 and below[0] == "state":
                name = (optimizer.numbers or {}).get(str(below[1]), optimizer.prefix + str(below[1]))
                optimizer.plain[fqn] = Key(name, dotted(below[2:]))
            elif len(below) == 1 and str(below[0]).startswith("state."):
                split = split_state(str(below[0])[6:], names)
                if split is not None:
                    optimizer.plain[fqn] = Key(optimizer.prefix + split[0], split[1])
