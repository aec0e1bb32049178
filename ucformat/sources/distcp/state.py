"""Name the tensors of a DCP checkpoint: which entry is a weight, which an optimizer state, and of which parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UsageError, option_text
from ucformat.geometry.box import row_major
from ucformat.geometry.tensor import Key
from ucformat.reading.stand_ins import StoredTensor
from ucformat.reading.state_names import (
    GROUPS,
    Naming,
    dotted,
    name_state,
    optimizer_roots,
    split_option,
    split_state,
)
from ucformat.sources.pickle.optimizer import Entry, Module, shape_of_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucformat.reading.readable import StatePath as Path
    from ucformat.sources.distcp.metadata import Metadata

Numbers = dict[str, str]


@dataclass(slots=True)
class Optimizer:
    """One optimizer: its path, its group entries, and how its parameters are named in the checkpoint."""

    root: Path
    options: dict[str, Path] = field(default_factory=dict)  # group entries: the path below the root
    plain: dict[str, Key] = field(default_factory=dict)  # states that are not tensors
    prefix: str = ""
    numbers: Numbers | None = None  # number -> name, if entries are numbered
    parameters: frozenset[str] = frozenset()  # their names, which may contain dots

    def name(self, entry: Any) -> str:
        """The name of a parameter in a group."""
        if self.numbers is not None and str(entry) in self.numbers:
            return self.numbers[str(entry)]
        if not isinstance(entry, str):
            raise IntegrityError(
                f"a group of the optimizer {dotted(self.root)} lists the parameter {entry!r}"
            )
        return self.prefix + entry


@dataclass(slots=True)
class NamedEntries:
    """All entries: tensors by name and state, optimizers, and the paths of other values."""

    tensors: dict[Key, str]
    optimizers: list[Optimizer]
    values: dict[str, Path]


def name_entries(
    meta: Metadata,
    groups_of: Callable[[Optimizer], list[dict[str, Any]]],
    given: Sequence[Sequence[str]] | None = None,
    owners: Mapping[str, str] | None = None,
) -> NamedEntries:
    """Name every entry.

    Args:
        groups_of: reads the groups of an optimizer, with `params` as in the file; called only if
            its entries are numbered.
        given: the parameter names of each group, for numbered entries; None: they are derived from
            shapes and order.
    """
    paths = _paths(meta)
    optimizers = [
        Optimizer(root) for root in sorted(optimizer_roots(paths.values()), key=len, reverse=True)
    ]
    order = {path: i for i, path in reversed(list(enumerate(paths.values())))}
    optimizers.sort(
        key=lambda o: (-len(o.root), min(i for p, i in order.items() if p[: len(o.root)] == o.root))
    )
    tensors, values = _separate(meta, paths, optimizers)
    naming = _naming(meta, optimizers, tensors, paths, owners)
    keys = naming.keys
    for optimizer in optimizers:
        optimizer.prefix = naming.prefixes[optimizer.root]
    _numbered(meta, optimizers, tensors, keys, groups_of, given)
    _plain_states(optimizers, values, keys)
    out: dict[Key, str] = {}
    for fqn, path in tensors.items():
        if (earlier := out.setdefault(keys[path], fqn)) != fqn:
            raise UsageError(
                f"{meta.file}: {earlier} and {fqn} would both be {keys[path]}",
                hint=f"specify which model each optimizer trains: {option_text('owners')}",
            )
    return NamedEntries(
        out,
        sorted(optimizers, key=lambda o: min((order[paths[f]] for f in o.options), default=0)),
        values,
    )


def _paths(meta: Metadata) -> dict[str, Path]:
    """The path of each entry; for entries without one, derived from the dots and `param_groups` in their names."""
    fqns = [*meta.tensors, *meta.values]
    bare = [f for f in fqns if f not in meta.paths]
    out: dict[str, Path] = {f: meta.paths[f] for f in fqns if f in meta.paths}
    roots = {f[: start - 1] for f in bare if (start := f.find("." + GROUPS) + 1)} | {
        "" for f in bare if f.startswith(GROUPS)
    }
    for fqn in bare:
        root = next((r for r in roots if r and fqn.startswith(r + ".")), None)
        out[fqn] = (root, fqn[len(root) + 1 :]) if root is not None else (fqn,)
    order = {f: i for i, f in enumerate(meta.paths)}
    return dict(sorted(out.items(), key=lambda item: order.get(item[0], len(order))))


def _separate(
    meta: Metadata, paths: Mapping[str, Path], optimizers: Iterable[Optimizer]
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Separate tensors and values from the entries of optimizer groups, which are added to the optimizers."""
    tensors: dict[str, Path] = {}
    values: dict[str, Path] = {}
    roots = {o.root: o for o in optimizers}
    for fqn, path in paths.items():
        depth = next(
            (
                i
                for i, p in enumerate(path)
                if isinstance(p, str) and (p + ".").startswith(GROUPS + ".")
            ),
            None,
        )
        if depth is not None and path[:depth] in roots:
            roots[path[:depth]].options[fqn] = path[depth:]
    for optimizer in roots.values():
        if not _are_groups(optimizer, meta):
            optimizer.options.clear()
    options = {fqn for o in roots.values() for fqn in o.options}
    for fqn, path in paths.items():
        if fqn not in options:
            (tensors if fqn in meta.tensors else values)[fqn] = path
    return tensors, values


def _are_groups(optimizer: Optimizer, meta: Metadata) -> bool:
    """Whether the entries are those of param groups and nothing else; one value may contain them all."""
    options = optimizer.options
    if all(len(below) == 1 and below[0] != GROUPS for below in options.values()):
        return all(all(split_option(str(below[0]))) for below in options.values())
    if list(options.values()) == [(GROUPS,)]:  # one value, as PyTorch 2.3 and before keep them
        return not options.keys() & meta.tensors.keys()
    numbers = {below[1] for below in options.values() if len(below) == 3 and below[2] == "params"}
    return numbers == set(range(len(numbers))) and all(
        len(b) >= 3 and b[0] == GROUPS and b[1] in numbers for b in options.values()
    )


def _number(path: Path, optimizer: Optimizer) -> str | None:
    """For a path like `state.7.exp_avg` below an optimizer, the 7."""
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
    """The names of weights and states, except numbered ones; sets the names that each optimizer's groups list."""
    leaves = {str(p[-1]) for p in tensors.values()}
    for optimizer in optimizers:
        names = set()
        for below in optimizer.options.values():  # flattened: `param_groups.<name>.lr`
            text = str(below[0])[len(GROUPS) + 1 :]
            if (
                len(below) == 1
                and text
                and (split := split_state(text, leaves))
                and not split[0].isdigit()
            ):
                names.add(split[0])
        optimizer.parameters = frozenset(names)
    places = {dotted(p[:i]): p[:i] for p in paths.values() for i in range(len(p))}
    for root, model in (owners or {}).items():
        if root not in places or model not in places:
            raise UsageError(
                f"{meta.file}: there is no {root if root not in places else model!r}, which "
                "`owners` names",
                hint="owners={the optimizer's path: its model's path}, both joined by dots",
            )
    return name_state(
        {path: meta.tensors[fqn].shape for fqn, path in tensors.items()},
        [o.root for o in optimizers],
        {places[root]: places[model] for root, model in (owners or {}).items()},
        {o.root: o.parameters for o in optimizers},
    )


def _numbered(
    meta: Metadata,
    optimizers: Sequence[Optimizer],
    tensors: Mapping[str, Path],
    keys: dict[Path, Key],
    groups_of: Callable[[Optimizer], list[dict[str, Any]]],
    given_names: Sequence[Sequence[str]] | None,
) -> None:
    """Name the states that a plain `optimizer.state_dict()` numbers."""
    weights = {
        keys[p].name: meta.tensors[f] for f, p in tensors.items() if keys[p].state == "weight"
    }
    remaining = None if given_names is None else list(given_names)
    for optimizer in optimizers:
        states: dict[str, dict[str, StoredTensor]] = {}
        numbered: dict[Path, tuple[str, str]] = {}
        for fqn, path in tensors.items():
            number = _number(path, optimizer)
            if number is not None:
                state, entry = dotted(path[len(optimizer.root) + 2 :]), meta.tensors[fqn]
                states.setdefault(number, {})[state] = _stand_in(entry.dtype, entry.shape)
                numbered[path] = (number, state)
                # A state without a name counted as a weight so far.
                weights.pop(keys[path].name, None)
        if not numbered:
            continue
        groups = groups_of(optimizer)
        numbers = [list(map(str, g.get("params") or ())) for g in groups]
        recorded = [list(map(str, g.get("param_names") or ())) for g in groups]
        if remaining is not None:
            recorded, remaining = (
                [list(g) for g in remaining[: len(groups)]],
                remaining[len(groups) :],
            )
        module = Module.of(
            {n: (e.dtype, e.shape) for n, e in weights.items()}, ordered=bool(meta.paths)
        )
        entries = [[Entry(shape_of_states(states.get(n, {}))) for n in group] for group in numbers]
        names = (
            recorded
            if [len(g) for g in recorded] == [len(g) for g in numbers]
            else module.match(entries)
        )
        if names is None or (remaining is not None and names is not recorded):
            raise _unnamed(meta, optimizer, numbers, given_names is not None)
        optimizer.numbers = {
            n: name
            for a, b in zip(numbers, names, strict=True)
            for n, name in zip(a, b, strict=True)
        }
        if any(number not in optimizer.numbers for number, _ in numbered.values()):
            raise IntegrityError(
                f"{meta.file}: {dotted(optimizer.root)} has states of parameters in none of its "
                "groups"
            )
        keys |= {
            path: Key(optimizer.numbers[number], state)
            for path, (number, state) in numbered.items()
        }


def _stand_in(dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor("", dtype, shape, row_major(shape), 0, 0)


def _unnamed(
    meta: Metadata,
    optimizer: Optimizer,
    numbers: Sequence[Sequence[str]],
    by_caller: bool,  # noqa: FBT001
) -> UsageError:
    where, sizes = dotted(optimizer.root) or "the optimizer", [len(g) for g in numbers]
    if by_caller:
        return UsageError(f"{meta.file}: the given names do not match groups of {sizes} parameters")
    return UsageError(
        f"{meta.file}: the states of {where} are numbered ({sizes} parameters by group), and "
        "their shapes and the "
        "order of the model do not determine which parameters the numbers mean",
        hint=f"name them: {option_text('groups')}",
    )


def _plain_states(
    optimizers: Sequence[Optimizer], values: dict[str, Path], keys: Mapping[Path, Key]
) -> None:
    """Add the states that are not tensors to the optimizers."""
    for optimizer in optimizers:
        names = {k.name.removeprefix(optimizer.prefix) for k in keys.values()}
        for fqn, path in values.items():
            below = (
                path[len(optimizer.root) :] if path[: len(optimizer.root)] == optimizer.root else ()
            )
            if len(below) >= 3 and below[0] == "state":
                name = (optimizer.numbers or {}).get(
                    str(below[1]), optimizer.prefix + str(below[1])
                )
                optimizer.plain[fqn] = Key(name, dotted(below[2:]))
            elif len(below) == 1 and str(below[0]).startswith("state."):
                split = split_state(str(below[0])[6:], names)
                if split is not None:
                    optimizer.plain[fqn] = Key(optimizer.prefix + split[0], split[1])
