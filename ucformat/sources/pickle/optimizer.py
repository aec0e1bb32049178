"""A torch optimizer's state dict: its states as those of the parameters that they belong to.

It is `{"state": {entry: {name of a state: value}}, "param_groups": [{"params": [entry, …], …}]}`. Entries are numbers,
counted through all groups, or (FSDP and `torch.distributed.checkpoint.state_dict`) the names of parameters themselves.

Numbers are named by `match` from what is known of each entry: the shape of its states, and under DeepSpeed's bf16 and
fp16 its fp32 copy, which the step rounds into the weight, so that their first elements prove it. Each group is taken to
list its parameters in the order of the module. A match is used only where it is the only one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.sources.index import Group, TensorIndex
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.sources.values import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.sources.pickle.file import TorchFile

__all__ = ["Candidate", "Entry", "Module", "Optimizer", "add_optimizer", "is_optimizer", "match", "shape_of_states"]

_FRONTIER = 20_000  # partial matches that are followed at once
_FACTORS = (("row_var", "col_var", True), ("exp_avg_sq_row", "exp_avg_sq_col", False))


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of an optimizer entry: None where nothing is."""

    shape: tuple[int, ...] | None
    sample: bytes | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter of the module."""

    name: str
    shape: tuple[int, ...]
    sample: bytes | None = None

    def fits(self, entry: Entry) -> bool:
        """Whether it may be that entry."""
        if entry.shape is not None and entry.shape != self.shape:
            return False
        return entry.sample is None or self.sample is None or entry.sample == self.sample


def shape_of_states(states: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a parameter, from that of its optimizer states."""
    tensors = {k: v for k, v in states.items() if isinstance(v, StoredTensor)}
    for rows, columns, kept in _FACTORS:  # torch's Adafactor keeps the reduced dim with size 1, transformers' drops it
        if rows in tensors and columns in tensors:
            row, column = tensors[rows].shape, tensors[columns].shape
            return (*(row[:-1] if kept else row), column[-1])
    shapes = {v.shape for k, v in tensors.items() if k != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def match(
    groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate], *, ordered: bool = True
) -> list[list[str]] | None:
    """The names of each group's entries; None where none or several assignments fit.

    `ordered`: the candidates stand in the order of the module. Where they do not, each entry must be told by its shape
    and sample alone.
    """
    found = _in_order(groups, candidates) if ordered else None
    return found if found is not None else _by_content(groups, candidates, shapes=not ordered)


def _in_order(groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate]) -> list[list[str]] | None:
    """The one way to deal the candidates, in their order, to the groups or to none (frozen); None where not just one.

    Walks the candidates with all partial matches at once, each known by how far every group is filled.
    """
    total = sum(map(len, groups))
    start = (0,) * len(groups)
    ways: dict[tuple[int, ...], int] = {start: 1}
    steps: list[dict[tuple[int, ...], int]] = []  # for each candidate: state after it -> group it went to, -1 for none
    for number, candidate in enumerate(candidates):
        after: Counter[tuple[int, ...]] = Counter()
        taken: dict[tuple[int, ...], int] = {}
        left = len(candidates) - number - 1
        for state, count in ways.items():
            moves = [(-1, state)]
            moves += [
                (g, (*state[:g], n + 1, *state[g + 1 :]))
                for g, n in enumerate(state)
                if n < len(groups[g]) and candidate.fits(groups[g][n])
            ]
            for group, reached in moves:
                if total - sum(reached) <= left:
                    after[reached] += count
                    taken[reached] = group
        if len(after) > _FRONTIER:
            return None
        ways = dict(after)
        steps.append(taken)
    state = tuple(map(len, groups))
    if ways.get(state) != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for candidate, taken in zip(reversed(candidates), reversed(steps), strict=True):
        group = taken[state]
        if group >= 0:
            names[group].append(candidate.name)
            state = (*state[:group], state[group] - 1, *state[group + 1 :])
    return [list(reversed(group)) for group in names]


def _by_content(
    groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate], *, shapes: bool
) -> list[list[str]] | None:
    """The match by shape and first elements (or by shapes alone), whatever the order; None where it is not unique."""
    known = {(c.shape, c.sample): c.name for c in candidates}
    counts = Counter((c.shape, c.sample) for c in candidates)
    entries = [(e.shape, e.sample) for group in groups for e in group]
    if len(set(entries)) != len(entries):
        return None
    for shape, sample in entries:
        if shape is None or (sample is None and not shapes) or counts[shape, sample] != 1:
            return None
    return [[known[e.shape or (), e.sample] for e in group] for group in groups]


_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of a module that optimizer entries may belong to; `ordered` as the module lists its parameters.

    Names are its own; in the checkpoint they stand behind `prefix`. `main` is the one module that no other is named as.
    """

    shapes: Mapping[str, tuple[int, ...]]  # of what may be parameters
    prefix: str = ""
    ordered: bool = True
    main: bool = True

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        prefix: str = "",
        *,
        ordered: bool = True,
        main: bool = True,
    ) -> Module:
        """Of dtypes and shapes by name: what is of floating point, and no buffer of torch's normalisation layers."""
        buffers = set()
        for name in tensors:
            path = name.removesuffix(_NORM_BUFFERS[2])
            if path != name and all(path + b in tensors for b in _NORM_BUFFERS):
                buffers |= {path + b for b in _NORM_BUFFERS}
        shapes = {
            name: shape
            for name, (dtype, shape) in tensors.items()
            if name not in buffers and dtype.startswith(("float", "bfloat", "complex"))
        }
        return cls(shapes, prefix, ordered, main)

    def find(self, told: list[list[str]]) -> list[list[str]] | None:
        """The full names of parameters that the optimizer was told, perhaps without or with a wrapper's prefix."""
        flat = [n for group in told for n in group]
        if not flat:
            return told
        first = flat[0]
        longer = {n.removesuffix(first) for n in self.shapes if n.endswith(f".{first}")} | {""}
        found = [{n: p + n for n in flat} for p in sorted(longer) if all(p + n in self.shapes for n in flat)]
        cuts = [first[: i + 1] for i, c in enumerate(first) if c == "."] if not found else []
        found += [
            {n: n.removeprefix(q) for n in flat}
            for q in cuts
            if all(n.startswith(q) and n.removeprefix(q) in self.shapes for n in flat)
        ]
        exact = [f for f in found if all(a == b for a, b in f.items())] or found
        return [[self.prefix + exact[0][n] for n in group] for group in told] if len(exact) == 1 else None

    def match(self, entries: list[list[Entry]]) -> list[list[str]] | None:
        """The names of the entries of each group; None where that is not certain."""
        return match(entries, [Candidate(self.prefix + n, s) for n, s in self.shapes.items()], ordered=self.ordered)


@dataclass(slots=True)
class Optimizer:
    """One optimizer's state dict, checked: its groups, and the states of each entry."""

    path: str  # where it stands: `optimizer`, `optimizer_states.0`
    file: TorchFile
    hypers: list[dict[str, Any]]
    entries: list[list[Any]]  # of each group: numbers or names
    states: list[list[dict[str, Any]]]
    rest: dict[str, Any] = field(default_factory=dict)  # what it holds besides

    @classmethod
    def parse(cls, value: dict[str, Any], path: str, file: TorchFile) -> Optimizer:
        """Out of the state dict; IntegrityError where it is not what torch writes."""
        found, groups = value["state"], value["param_groups"]
        entries = [list(group["params"]) for group in groups]
        flat = [entry for group in entries for entry in group]
        if len(set(flat)) != len(flat) or not all(isinstance(s, dict) for s in found.values()):
            raise IntegrityError(f"{file.key}: {path} lists a parameter twice, or a state that is no dictionary")
        if strange := [entry for entry in found if entry not in set(flat)]:
            raise IntegrityError(f"{file.key}: {path} has states of {strange[0]!r}, which is in none of its groups")
        states = [[dict(found.get(entry, {})) for entry in group] for group in entries]
        rest = {k: v for k, v in value.items() if k not in ("state", "param_groups")}
        return cls(path, file, groups, entries, states, rest)

    @property
    def known(self) -> list[list[Entry]]:
        """What is known of each entry."""
        return [[Entry(shape_of_states(states)) for states in group] for group in self.states]

    def told(self) -> list[list[str]] | None:
        """The names of the entries, where the file says them: as entries, or (PyTorch 2.6) in `param_names`."""
        if all(isinstance(e, str) for group in self.entries for e in group):
            return self.entries
        names = [list(g.get("param_names") or ()) for g in self.hypers]
        flat = [n for group in names for n in group]
        if [len(g) for g in names] != [len(g) for g in self.entries] or len(set(flat)) != len(flat):
            return None
        return names if all(isinstance(n, str) for n in flat) else None

    def name(self, modules: Sequence[Module]) -> list[list[str]] | None:
        """The names of the entries: as the file says, or as shapes and order prove; None where neither."""
        told = self.told()
        if told is not None:
            own = [(m, names) for m in modules if (names := m.find(told)) is not None]
            main = [names for m, names in own if m.main]
            return main[0] if main else own[0][1] if len(own) == 1 else told
        found = [(m, names) for m in modules if (names := m.match(self.known)) is not None]
        if len(found) > 1:  # averages of the main module, which no optimizer steps, or else nobody knows
            stepped = [(m, names) for m, names in found if m.main]
            return stepped[0][1] if stepped and all(m.shapes == stepped[0][0].shapes for m, _ in found) else None
        if not found and len(modules) > 1:  # one optimizer of several modules
            joined = {m.prefix + n: shape for m in modules for n, shape in m.shapes.items()}
            return Module(joined, ordered=all(m.ordered for m in modules)).match(self.known)
        return found[0][1] if found else None


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(g, dict) and isinstance(g.get("params"), list) and all(type(p) in (int, str) for p in g["params"])
        for g in groups
    )


def add_optimizer(
    optimizer: Optimizer,
    modules: Sequence[Module],
    contents: TensorIndex,
    given: Sequence[Sequence[str]] | None = None,
) -> bool:
    """Add its tensors and groups under the names of its parameters; `given` are those that the caller knows.

    Where the names are not certain, entry 7 of `optimizer` becomes `optimizer.7`, and the answer is False.
    """
    if given is not None:
        _check(optimizer, given, {m.prefix + n: s for m in modules for n, s in m.shapes.items()})
    names = given if given is not None else optimizer.name(modules)
    states = [s for group in optimizer.states for s in group]
    if names is not None and any(
        Key(name, str(state)) in contents.infos
        for name, of in zip((n for group in names for n in group), states, strict=True)
        for state in of
    ):
        names = None  # a second optimizer of the same parameters
    certain = names is not None
    if names is None:
        names = [[f"{optimizer.path}.{entry}" for entry in group] for group in optimizer.entries]
    for hyper, group, of in zip(optimizer.hypers, names, optimizer.states, strict=True):
        contents.groups.append(_add_group(optimizer, hyper, group, of, contents))
    return certain


def _add_group(
    optimizer: Optimizer, hyper: dict[str, Any], names: Sequence[str], of: list[dict[str, Any]], contents: TensorIndex
) -> Group:
    """The tensors of a group's entries; its hyper-parameters, and its states that are plain values."""
    kept = {k: v for k, v in hyper.items() if k != "params" and (k != "param_names" or len(v or ()) != len(names))}
    group = Group(list(names), _json(kept, optimizer, f"{optimizer.path}.param_groups", contents))
    plain: dict[str, dict[str, Any]] = {}
    for name, states in zip(names, of, strict=True):
        for state, value in states.items():
            if isinstance(value, StoredTensor):
                contents.add_whole(name, str(state), optimizer.file, value)
            else:
                plain.setdefault(str(state), {})[name] = _json(value, optimizer, f"{name}.{state}", contents)
    stateful = sum(map(bool, of))  # a parameter that never had a gradient has no state
    group.state = {
        state: next(iter(values.values())) if len(values) == stateful and _one(values) else values
        for state, values in plain.items()
    }
    return group


def _json(value: Any, optimizer: Optimizer, path: str, contents: TensorIndex) -> Any:
    def spill(where: str, tensor: StoredTensor) -> str:
        return contents.add_large(where, optimizer.file, tensor)

    return to_json(value, read=optimizer.file.read, spill=spill, path=path)


def _check(optimizer: Optimizer, names: Sequence[Sequence[str]], shapes: Mapping[str, Any]) -> None:
    """The names are as many as the entries, and the shapes of the states are those of the parameters."""
    if [len(g) for g in names] != [len(g) for g in optimizer.entries]:
        raise UsageError(
            f"{optimizer.file.key}: {[len(g) for g in names]} names are given for groups of "
            f"{[len(g) for g in optimizer.entries]} parameters in {optimizer.path}"
        )
    for group, of in zip(names, optimizer.known, strict=True):
        for name, entry in zip(group, of, strict=True):
            if name in shapes and entry.shape is not None and entry.shape != shapes[name]:
                raise UsageError(
                    f"{optimizer.file.key}: {name} cannot be the entry at its place in {optimizer.path}: its states "
                    f"have the shape {entry.shape}, and it has {shapes[name]}",
                    hint="the names must be in the order in which the optimizer was given the parameters",
                )


def _one(values: dict[str, Any]) -> bool:
    """Whether all values are the same."""
    first = next(iter(values.values()))
    return all(type(v) is type(first) and v == first for v in values.values())
