"""A torch optimizer's state dict: its states as states of the parameters that they belong to.

It is `{"state": {entry: {name of a state: value}}, "param_groups": [{"params": [entry, …], …}]}`.
Entries are numbers, counted through all groups, or (FSDP and
`torch.distributed.checkpoint.state_dict`) the names of the parameters.

`match` finds the names of numbers from evidence for each entry: the shape of its states and, under
DeepSpeed's bf16 and fp16, its fp32 copy, which the optimizer step rounds to the weight, so that the
first elements of both prove it. Each group is assumed to list its parameters in the order of the
module. A match is used only if it is unique.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import GroupPlace, IntKey
from ucformat.reading.stand_ins import StoredTensor
from ucformat.reading.values import shared_value
from ucformat.sources.index import Group, TensorIndex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.reading.readable import StatePath
    from ucformat.sources.pickle.file import TorchFile

_MAX_PARTIAL = 20_000  # partial matches that are followed at the same time
_FACTORS = (("row_var", "col_var", True), ("exp_avg_sq_row", "exp_avg_sq_col", False))


@dataclass(frozen=True, slots=True)
class Entry:
    """The evidence for an optimizer entry: its shape and first elements; None if unknown."""

    shape: tuple[int, ...] | None
    sample: bytes | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter of the module."""

    name: str
    shape: tuple[int, ...]
    sample: bytes | None = None

    def fits(self, entry: Entry) -> bool:
        """Whether the parameter may be an entry."""
        if entry.shape is not None and entry.shape != self.shape:
            return False
        return entry.sample is None or self.sample is None or entry.sample == self.sample


def shape_of_states(states: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Derive the shape of a parameter from its optimizer states; None if they do not determine it.

    Args:
        states: the states by name; values that are not tensors are ignored.
    """
    tensors = {k: v for k, v in states.items() if isinstance(v, StoredTensor)}
    for (
        rows,
        columns,
        keeps_dim,
    ) in _FACTORS:  # torch's Adafactor keeps the reduced dim with size 1, transformers' drops it
        if rows in tensors and columns in tensors:
            row, column = tensors[rows].shape, tensors[columns].shape
            return (*(row[:-1] if keeps_dim else row), column[-1])
    shapes = {v.shape for k, v in tensors.items() if k != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def match(
    groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate], *, ordered: bool = True
) -> list[list[str]] | None:
    """Assign names to the entries of an optimizer's groups.

    Args:
        ordered: whether the candidates are in the order of the module. If not, shape and sample
            must identify each entry.

    Returns:
        the names of each group's entries; None unless exactly one assignment fits.
    """
    names = _in_order(groups, candidates) if ordered else None
    return names if names is not None else _by_content(groups, candidates, shapes=not ordered)


def _in_order(
    groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate]
) -> list[list[str]] | None:
    """The only way to assign the candidates, in order, to groups or to none (frozen); None unless there is exactly one.

    Walks the candidates with all partial matches at once, each described by the number of filled
    entries of each group.
    """
    total = sum(map(len, groups))
    start = (0,) * len(groups)
    ways: dict[tuple[int, ...], int] = {start: 1}
    steps: list[
        dict[tuple[int, ...], int]
    ] = []  # for each candidate: state after it -> group it went to, -1 for none
    for number, candidate in enumerate(candidates):
        after: Counter[tuple[int, ...]] = Counter()
        group_taken: dict[tuple[int, ...], int] = {}
        left = len(candidates) - number - 1
        for state, count in ways.items():
            moves = [(-1, state)]
            moves += [
                (g, (*state[:g], n + 1, *state[g + 1 :]))
                for g, n in enumerate(state)
                if n < len(groups[g]) and candidate.fits(groups[g][n])
            ]
            for group, reached in moves:
                # Enough candidates must be left for the entries that are not yet filled.
                if total - sum(reached) <= left:
                    after[reached] += count
                    # If several moves lead here, only the last is kept, which is enough: the way
                    # is walked back only if it is the only one to the end, and then each state
                    # on it was reached by one move.
                    group_taken[reached] = group
        if len(after) > _MAX_PARTIAL:
            return None
        ways = dict(after)
        steps.append(group_taken)
    state = tuple(map(len, groups))
    if ways.get(state) != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for candidate, group_taken in zip(reversed(candidates), reversed(steps), strict=True):
        group = group_taken[state]
        if group >= 0:
            names[group].append(candidate.name)
            state = (*state[:group], state[group] - 1, *state[group + 1 :])
    return [list(reversed(group)) for group in names]


def _by_content(
    groups: Sequence[Sequence[Entry]], candidates: Sequence[Candidate], *, shapes: bool
) -> list[list[str]] | None:
    """The match by shape and first elements (or by shapes alone), in any order; None unless it is unique."""
    names = {(c.shape, c.sample): c.name for c in candidates}
    counts = Counter((c.shape, c.sample) for c in candidates)
    entries = [(e.shape, e.sample) for group in groups for e in group]
    if len(set(entries)) != len(entries):
        return None
    for shape, sample in entries:
        if shape is None or (sample is None and not shapes) or counts[shape, sample] != 1:
            return None
    return [[names[e.shape or (), e.sample] for e in group] for group in groups]


_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of a module that optimizer entries may belong to."""

    # of the possible parameters, by their names in the module
    shapes: Mapping[str, tuple[int, ...]]
    prefix: str = ""  # of the names in the checkpoint
    ordered: bool = True  # whether `shapes` is in the order of the module
    main: bool = True  # whether it is the main module, whose names have no prefix

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        prefix: str = "",
        *,
        ordered: bool = True,
        main: bool = True,
    ) -> Module:
        """Create it from a state dict: tensors of floating point that are not buffers of normalisation layers.

        Args:
            ordered: whether the tensors are in the order of the module.
        """
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

    @property
    def unwrapped(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes by their names without the prefix of a wrapper, such as `AveragedModel`."""
        wrapped = all(name.startswith("module.") for name in self.shapes)
        return (
            {n.removeprefix("module."): s for n, s in self.shapes.items()}
            if wrapped
            else self.shapes
        )

    def find(self, names: list[list[str]]) -> list[list[str]] | None:
        """Find the parameters that an optimizer's file names, possibly without or with the prefix of a wrapper.

        Returns:
            their names in the checkpoint; None if some are not in this module, or the prefix is
            ambiguous.
        """
        flat = [n for group in names for n in group]
        if not flat:
            return names
        first = flat[0]
        added = {n.removesuffix(first) for n in self.shapes if n.endswith(f".{first}")} | {""}
        matches = [
            {n: p + n for n in flat}
            for p in sorted(added)
            if all(p + n in self.shapes for n in flat)
        ]
        removed = [first[: i + 1] for i, c in enumerate(first) if c == "."] if not matches else []
        matches += [
            {n: n.removeprefix(q) for n in flat}
            for q in removed
            if all(n.startswith(q) and n.removeprefix(q) in self.shapes for n in flat)
        ]
        # Names that fit as they are, are not ambiguous, even if they also fit with a prefix.
        exact = [f for f in matches if all(a == b for a, b in f.items())] or matches
        return (
            [[self.prefix + exact[0][n] for n in group] for group in names]
            if len(exact) == 1
            else None
        )

    def match(self, entries: list[list[Entry]]) -> list[list[str]] | None:
        """Assign names to the entries of an optimizer's groups; None unless exactly one assignment fits."""
        return match(
            entries,
            [Candidate(self.prefix + n, s) for n, s in self.shapes.items()],
            ordered=self.ordered,
        )


@dataclass(slots=True)
class Optimizer:
    """One optimizer's state dict: its groups, and the states of each entry."""

    path: str  # in the file's value: `optimizer`, `optimizer_states.0`
    file: TorchFile
    hypers: list[dict[str, Any]]
    entries: list[list[Any]]  # of each group: numbers or names
    states: list[list[dict[str, Any]]]
    rest: dict[str, Any] = field(default_factory=dict)  # its other keys
    place: StatePath | None = None  # its path in the program's state, if the source records these

    @classmethod
    def parse(
        cls, value: dict[str, Any], path: str, file: TorchFile, place: StatePath | None = None
    ) -> Optimizer:
        """Check and parse a state dict."""
        by_entry, groups = value["state"], value["param_groups"]
        entries = [list(group["params"]) for group in groups]
        flat = [entry for group in entries for entry in group]
        if len(set(flat)) != len(flat) or not all(isinstance(s, dict) for s in by_entry.values()):
            raise IntegrityError(
                f"{file.key}: {path} lists a parameter twice, or a state that is not a dictionary"
            )
        if strange := [entry for entry in by_entry if entry not in set(flat)]:
            raise IntegrityError(
                f"{file.key}: {path} has states of {strange[0]!r}, which is in none of its groups"
            )
        states = [[dict(by_entry.get(entry, {})) for entry in group] for group in entries]
        rest = {k: v for k, v in value.items() if k not in ("state", "param_groups")}
        return cls(path, file, groups, entries, states, rest, place)

    @property
    def evidence(self) -> list[list[Entry]]:
        """The evidence for each entry."""
        return [[Entry(shape_of_states(states)) for states in group] for group in self.states]

    def recorded_names(self) -> list[list[str]] | None:
        """The names of the entries in the file, if it has them: as entries, or (since PyTorch 2.6) in `param_names`."""
        if all(isinstance(e, str) for group in self.entries for e in group):
            return self.entries
        names = [list(g.get("param_names") or ()) for g in self.hypers]
        flat = [n for group in names for n in group]
        if [len(g) for g in names] != [len(g) for g in self.entries] or len(set(flat)) != len(flat):
            return None
        return names if all(isinstance(n, str) for n in flat) else None

    def name(self, modules: Sequence[Module]) -> list[list[str]] | None:
        """Find the names of each group's entries: in the file, or proven by shapes and order; None if unknown."""
        recorded = self.recorded_names()
        if recorded is not None:
            named = [(m, names) for m in modules if (names := m.find(recorded)) is not None]
            main = [names for m, names in named if m.main]
            return main[0] if main else named[0][1] if len(named) == 1 else recorded
        matched = [(m, names) for m in modules if (names := m.match(self.evidence)) is not None]
        # unambiguous only if all others are averages of the main module, which has the optimizer
        if len(matched) > 1:
            stepped = [(m, names) for m, names in matched if m.main]
            return (
                stepped[0][1]
                if stepped and all(m.unwrapped == stepped[0][0].unwrapped for m, _ in matched)
                else None
            )
        if not matched and len(modules) > 1:  # one optimizer of several modules
            joined = {m.prefix + n: shape for m in modules for n, shape in m.shapes.items()}
            return Module(joined, ordered=all(m.ordered for m in modules)).match(self.evidence)
        return matched[0][1] if matched else None


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer's state dict."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(g, dict)
        and isinstance(g.get("params"), list)
        and all(type(p) in (int, str) for p in g["params"])
        for g in groups
    )


def add_optimizer(
    optimizer: Optimizer,
    modules: Sequence[Module],
    contents: TensorIndex,
    given: Sequence[Sequence[str]] | None = None,
) -> bool:
    """Add an optimizer's tensors and groups under the names of its parameters.

    If the names are not certain, entry 7 of `optimizer` becomes `optimizer.7`.

    Args:
        given: the names of each group's parameters, from the caller; None: they are derived.
    """
    if given is not None:
        _check(optimizer, given, {m.prefix + n: s for m in modules for n, s in m.shapes.items()})
    names = given if given is not None else optimizer.name(modules)
    states = [s for group in optimizer.states for s in group]
    if names is not None and any(
        Key(name, str(state)) in contents.infos
        for name, entry_states in zip((n for group in names for n in group), states, strict=True)
        for state in entry_states
    ):
        names = None  # a second optimizer of the same parameters
    certain = names is not None
    if names is None:
        names = [[f"{optimizer.path}.{entry}" for entry in group] for group in optimizer.entries]
    for number, group in enumerate(names):
        contents.groups.append(_add_group(optimizer, number, group, contents))
    return certain


def _add_group(
    optimizer: Optimizer, number: int, names: Sequence[str], contents: TensorIndex
) -> Group:
    """Add the tensors of a group's entries; return its hyper-parameters, and its states that are plain values."""
    hyper, entries, entry_states = (
        optimizer.hypers[number],
        optimizer.entries[number],
        optimizer.states[number],
    )
    place = optimizer.place
    contents.places.append(None if place is None else GroupPlace(place, tuple(map(str, entries))))
    redundant = place is None and len(hyper.get("param_names") or ()) == len(names)
    options = {
        k: v for k, v in hyper.items() if k != "params" and not (k == "param_names" and redundant)
    }
    group = Group(
        list(names), _json(options, optimizer, f"{optimizer.path}.param_groups", contents)
    )
    plain: dict[str, dict[str, Any]] = {}
    for name, entry, states in zip(names, entries, entry_states, strict=True):
        for state, value in states.items():
            if not isinstance(value, StoredTensor):
                plain.setdefault(str(state), {})[name] = _json(
                    value, optimizer, f"{name}.{state}", contents
                )
                continue
            contents.add_whole(name, str(state), optimizer.file, value)
            if place is not None:
                path = (*place, "state", IntKey(entry) if isinstance(entry, int) else entry, state)
                contents.paths[Key(name, str(state))] = (path,)
    stateful = sum(map(bool, entry_states))  # a parameter that never had a gradient has no state
    group.state = {state: shared_value(values, stateful) for state, values in plain.items()}
    return group


def _json(value: Any, optimizer: Optimizer, path: str, contents: TensorIndex) -> Any:
    return contents.json_of(optimizer.file, value, path, exact=optimizer.place is not None)


def _check(optimizer: Optimizer, names: Sequence[Sequence[str]], shapes: Mapping[str, Any]) -> None:
    """Check that there are as many names as entries, and that the states have the shapes of the parameters."""
    if [len(g) for g in names] != [len(g) for g in optimizer.entries]:
        raise UsageError(
            f"{optimizer.file.key}: {[len(g) for g in names]} names are given for groups of "
            f"{[len(g) for g in optimizer.entries]} parameters in {optimizer.path}"
        )
    for group, evidence in zip(names, optimizer.evidence, strict=True):
        for name, entry in zip(group, evidence, strict=True):
            if name in shapes and entry.shape is not None and entry.shape != shapes[name]:
                raise UsageError(
                    f"{optimizer.file.key}: {name} cannot be the entry at its place in "
                    f"{optimizer.path}: its states "
                    f"have the shape {entry.shape}, and it has {shapes[name]}",
                    hint=(
                        "the names must be in the order in which the optimizer was given the "
                        "parameters"
                    ),
                )
