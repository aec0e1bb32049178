"""Which parameter is which entry of a torch optimizer, where its state dict does not say.

Its state is by number: the entries of all groups, counted through. The names are in none of its keys, save where the
optimizer was given named parameters (`param_names`). They are found from what is known of each entry: the shape of its
states, and under DeepSpeed's bf16 and fp16 its fp32 copy, which the step rounds into the weight, so that their first
elements prove it. Each group is taken to list its parameters in the order of the module. A match is used only where it
is the only one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.sources.stand_ins import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Candidate", "Entry", "match", "shape_of_states"]

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
