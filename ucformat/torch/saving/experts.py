"""Which experts of a mixture of experts are saved, and how many tokens what is stored of the others has not seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from ucformat.errors import Conflict, UsageError
from ucformat.geometry.patterns import compile_pattern
from ucformat.jobs.increments import row_alike
from ucformat.schema.limits import MAX_CHAIN, MAX_INTEGER
from ucformat.schema.manifest import DeltasDoc, ExpertLayerDoc, ExpertsDoc, WindowDoc
from ucformat.torch.comm.merging import bits_of, ones_of
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.jobs.increments import Base
    from ucformat.schema.manifest import Manifest
    from ucformat.schema.tensors import TensorDoc
    from ucformat.torch.state.local import LocalShard, LocalState

__all__ = ["Experts"]

#: Names of single experts: `experts.3.…`, with a list of its own between, and of grouped ones, `linear_fc1.weight3`.
_PATTERNS = (
    r"(?P<layer>(?:.*\.)?experts)\.(?:[a-z]+_experts\.)?(?P<expert>[0-9]+)\..*",
    r"(?P<layer>(?:.*\.)?experts)\.linear_fc[12]\.(?:weight|bias)(?P<expert>[0-9]+)",
)
_STACKED = re.compile(r"(?:.*\.)?experts\..*")


@message
class Experts:
    """Which experts of a mixture of experts a save writes; the base's tensors stand for the others.

    Everything that belongs to no expert is saved as always. The optimizer's states go with their
    expert. An expert that the base does not have as the program does, with the same tensors, is
    saved, too.

    Attributes:
        k: how many experts of each layer are saved.
        choose: `rotate` takes those that were saved longest ago, as the base records it, so that a
            restarted training goes on with them; `load` takes those that were given most tokens
            since they were saved, by `tokens=` of each save.
        max_lost: the largest share of tokens that may be lost if the training went on from this
            checkpoint: further experts are saved, those with most unsaved tokens first, until it is
            kept (default: no limit). It needs `tokens=`.
        pattern: a regular expression that matches whole names of tensors of experts, with the groups
            `layer` and `expert`, a number (default: the usual names,
            docs/guides/sparse.md).
        max_chain: how many partial saves of `Manager` may follow each other before everything is
            saved, at most 63.

    Raises:
        UsageError: an attribute is not one of these, or the pattern lacks a group.
    """

    k: int = 1
    choose: Literal["rotate", "load"] = "rotate"
    max_lost: float | None = None
    pattern: str | None = None
    max_chain: int = MAX_CHAIN - 1

    def __post_init__(self) -> None:
        if self.choose not in get_args(_Choice):
            raise UsageError(f"choose={self.choose!r} is not supported", hint='"rotate" or "load"')
        if self.k < 1:
            raise UsageError(f"k must be at least 1, not {self.k}")
        if not 1 <= self.max_chain < MAX_CHAIN:
            raise UsageError(f"max_chain must be 1 to {MAX_CHAIN - 1}, not {self.max_chain}")
        if self.max_lost is not None and not 0 <= self.max_lost < 1:
            raise UsageError(f"max_lost must be a share from 0 to below 1, not {self.max_lost}")
        if self.pattern is not None:
            groups = compile_pattern(self.pattern).regex.groupindex.keys()
            if not {"layer", "expert"} <= groups:
                raise UsageError(
                    f"the pattern {self.pattern!r} lacks one of the groups layer and expert",
                    hint=r"(?P<layer>.*\.experts)\.(?P<expert>[0-9]+)\..*",
                )

    @property
    def needs_tokens(self) -> bool:
        """Whether the choice depends on counts of tokens."""
        return self.choose == "load" or self.max_lost is not None


_Choice = Literal["rotate", "load"]


class NamesPlaces(Protocol):
    """Tells of names to what their tensors belong."""

    def place(self, name: str) -> object | None:
        """What it belongs to; None if that is nothing."""


class Place(NamedTuple):
    """An expert: the layer as names have it, and its number in the layer."""

    layer: str
    expert: int


class ExpertNames:
    """Tells of names which expert their tensors belong to."""

    def __init__(self, pattern: str | None) -> None:
        patterns = _PATTERNS if pattern is None else (pattern,)
        self._patterns = [compile_pattern(p) for p in patterns]
        self._is_default = pattern is None
        self._places: dict[str, Place | None] = {}

    def place(self, name: str) -> Place | None:
        """The expert of a tensor; None if it belongs to none.

        Raises:
            UsageError: the tensor has several experts, or the number of an expert is none.
        """
        if name not in self._places:
            self._places[name] = self._find(name)
        return self._places[name]

    def _find(self, name: str) -> Place | None:
        for pattern in self._patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if not re.fullmatch("[0-9]{1,9}", match["expert"] or "") or match["layer"] is None:
                raise UsageError(
                    f"the pattern finds the expert {match['expert']!r} in {name!r}, which is no number",
                    hint="let the group expert match digits only",
                )
            return Place(match["layer"], int(match["expert"]))
        if self._is_default and _STACKED.fullmatch(name):
            raise UsageError(
                f"{name} is of experts, and its name has no number of one: experts that are stacked "
                "in one tensor cannot be saved in part",
                hint="leave partial out, or give a pattern that matches the names of single experts",
            )
        return None


@message
class PartialSave:
    """What a partial save takes from its base, and what it records.

    Attributes:
        base: the id of the base; empty if everything is saved.
        attempt: the one that is committed there: what replaces a base in place keeps its id.
        left: a bit for each tensor of the base, in its order: whether that stands for this one's.
        record: the counts of tokens, if they were given.
        window: the place in a window.
        deltas: the deltas since everything was saved.
    """

    base: str = ""
    attempt: str = ""
    left: bytes = b""
    record: ExpertsDoc | None = None
    window: WindowDoc | None = None
    deltas: DeltasDoc | None = None


class Left(NamedTuple):
    """The tensors of a base that stand for those that are not saved, what the checkpoint records, and more to save."""

    tensors: Sequence[TensorDoc]
    record: ExpertsDoc | None = None
    window: WindowDoc | None = None
    deltas: DeltasDoc | None = None
    added: tuple[LocalShard, ...] = ()


def left_tensors(base: Base, partial: PartialSave | None) -> list[TensorDoc]:
    """The tensors of a base that stand for those that are not saved.

    Raises:
        Conflict: another checkpoint has taken the place of the base.
    """
    if partial is None or not partial.base:
        return []
    if (base.manifest.id, base.manifest.attempt) != (partial.base, partial.attempt):
        raise Conflict(
            f"{base.url} is no longer the checkpoint {partial.base} as it was, from which experts were to be taken",
            hint="save again",
        )
    table = base.manifest.tensors
    return [table[row] for row in ones_of(partial.left)]


@message
class HeldByRanks:
    """What ranks hold: a bit for each tensor of the base, and one for each expert with tensors that the base lacks."""

    tensors: bytes
    others: bytes


@message
class RecordBefore:
    """The last record of tokens of a training, and whether it was restarted since."""

    record: ExpertsDoc | None = None
    resumed: bool = False


def counts_of(experts: Experts, tokens: Any) -> dict[str, list[int]]:
    if tokens is None:
        if experts.needs_tokens:
            raise UsageError(
                f"{experts} chooses by tokens, and there are no counts of them",
                hint="tokens={layer: [how many each expert was given since training began]}",
            )
        return {}
    if not isinstance(tokens, Mapping):
        raise UsageError(f"tokens is a {type(tokens).__name__}", hint="tokens={layer: [count, …]}")
    counts = {str(layer): [int(n) for n in of_layer] for layer, of_layer in tokens.items()}
    for layer, of_layer in counts.items():
        if not of_layer or min(of_layer) < 0 or max(of_layer) > MAX_INTEGER:
            raise UsageError(f"tokens[{layer!r}] has no counts, or one out of range")
    return dict(sorted(counts.items()))


def check_state(local: LocalState, names: NamesPlaces) -> None:
    """Check that what belongs to experts are tensors, each under its own name."""
    for alias, stored in local.aliases.items():
        if names.place(alias) is not None or names.place(stored) is not None:
            raise UsageError(
                f"{alias} is tied to {stored}, so one cannot be saved without the other",
                hint="leave partial out, or give a pattern that matches neither",
            )
    for name in _texts(local.objects):
        if names.place(name) is not None:
            raise UsageError(
                f"the state has a value for {name} that is no tensor, and would be newer than the expert",
                hint="leave partial out; PyTorch's own optimizers keep tensors only",
            )
    for t in local.tensors:
        names.place(t.info.name)


def _texts(values: Any) -> Iterator[str]:
    """The keys of nested values."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield key
            yield from _texts(value)


def rows_of_bits(bits: bytes, count: int) -> NDArray[np.bool_]:
    """For each row of a table whether its bit is set."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)


@dataclass
class _Expert:
    """An expert of the base: the rows of its tensors there, and the step at which it was saved."""

    place: Place
    number: int  # among all of the base
    index: int  # in its layer
    rows: list[int] = field(default_factory=list)
    step: int = 0
    unsaved: int = 0  # tokens
    share: float = 0.0  # of the tokens of all layers that would be lost with it


class Selection:
    """The experts of a base, and which of them are left where they are."""

    def __init__(self, names: ExpertNames, base: Manifest | None) -> None:
        self.names, self._base = names, base

    @property
    def has_base(self) -> bool:
        """Whether there is a base, so that something may be left there."""
        return self._base is not None

    @property
    def base(self) -> Manifest:
        """The manifest of the base."""
        assert self._base is not None  # noqa: S101 - it has been asked for
        return self._base

    @cached_property
    def experts(self) -> dict[Place, _Expert]:
        """The experts of the base, layer by layer."""
        table, rows = self.base.tensors, dict[Place, list[int]]()
        for row, number in enumerate(table.name):
            place = self.names.place(table.names[number])
            if place is not None:
                rows.setdefault(place, []).append(row)
        older = dict(table.older())
        out: dict[Place, _Expert] = {}
        layers = {layer: n for n, layer in enumerate(dict.fromkeys(p.layer for p in rows))}
        indexes = dict.fromkeys(layers, 0)
        for place in sorted(rows, key=lambda p: (layers[p.layer], p.expert)):
            expert = _Expert(place, len(out), indexes[place.layer], rows[place])
            indexes[place.layer] += 1
            docs = [table[row] for row in expert.rows]
            own = self.base.step or 0
            expert.step = min(older.get((doc.name, doc.state), own) for doc in docs)
            out[place] = expert
        return out

    @cached_property
    def layers(self) -> dict[str, list[_Expert]]:
        """The experts of each layer."""
        out: dict[str, list[_Expert]] = {}
        for expert in self.experts.values():
            out.setdefault(expert.place.layer, []).append(expert)
        return out

    def held_by(self, local: LocalState) -> HeldByRanks:
        """What a rank holds of what the base has of experts."""
        table, rows, others = self.base.tensors, set[int](), set[int]()
        for t in local.tensors:
            place = self.names.place(t.info.name)
            expert = None if place is None else self.experts.get(place)
            if expert is None:
                continue
            alike = row_alike(table, t.info)
            if alike is not None:
                rows.add(alike[0])
            else:
                others.add(expert.number)
        return HeldByRanks(
            bits_of(row in rows for row in range(len(table))),
            bits_of(number in others for number in range(len(self.experts))),
        )

    def leave(
        self,
        experts: Experts,
        held: HeldByRanks,
        counts: Mapping[str, Sequence[int]],
        before: RecordBefore,
    ) -> tuple[list[TensorDoc], ExpertsDoc | None]:
        """The tensors of the base that stand for experts that are not saved, and the record of tokens.

        Raises:
            UsageError: the base has no experts, or the counts are not those of its layers.
        """
        if not self.experts:
            raise UsageError(
                "no tensor of the base has the name of an expert",
                hint=r"pattern=r'(?P<layer>…)\.(?P<expert>[0-9]+)\..*', which matches whole names",
            )
        table = self.base.tensors
        tensors = rows_of_bits(held.tensors, len(table))
        others = rows_of_bits(held.others, len(self.experts))
        alike = {
            place
            for place, expert in self.experts.items()
            if tensors[expert.rows].all() and not others[expert.number]
        }
        tokens = _Tokens(self, counts, before) if counts else None
        if tokens is not None and (tokens.before is None or self.base.experts is None):
            return [], tokens.record(
                frozenset(self.experts)
            )  # nothing tells what the base has seen
        if tokens is not None:
            for expert in self.experts.values():
                expert.unsaved = tokens.unsaved(expert)
                of_layer = max(1, sum(counts[expert.place.layer]))
                expert.share = expert.unsaved / of_layer / len(counts)
        saved = {place for place in self.experts if place not in alike}
        for ordinal, layer in enumerate(self.layers.values()):
            ordered = sorted(layer, key=_order_of(experts, ordinal, len(layer)))
            saved |= {expert.place for expert in ordered[: experts.k]}
        if experts.max_lost is not None and tokens is not None:
            rest = sorted(
                (e for e in self.experts.values() if e.place not in saved),
                key=lambda e: (-e.share, e.number),
            )
            lost = tokens.lost(frozenset(saved))
            for expert in rest:
                if not expert.unsaved or lost <= experts.max_lost:
                    break
                saved.add(expert.place)
                lost -= expert.share
        left = [self.experts[place] for place in self.experts if place not in saved]
        docs = [table[row] for expert in left for row in expert.rows]
        record = None if tokens is None else tokens.record(frozenset(saved))
        return docs, record


def bits_of_docs(base: Manifest, docs: Iterable[TensorDoc]) -> bytes:
    """A bit for each tensor of a base: whether it is one of these."""
    keys = {(doc.name, doc.state) for doc in docs}
    return bits_of((doc.name, doc.state) in keys for doc in base.tensors)


def _order_of(experts: Experts, ordinal: int, count: int) -> Callable[[_Expert], tuple[int, ...]]:
    """By what experts of a layer are chosen: layers begin at different ones, so that ranks write alike."""

    def order(expert: _Expert) -> tuple[int, ...]:
        by_turn = expert.step, (expert.index - ordinal * experts.k) % count
        return by_turn if experts.choose == "rotate" else (-expert.unsaved, *by_turn)

    return order


def record_of(
    selection: Selection, counts: Mapping[str, Sequence[int]], before: RecordBefore
) -> ExpertsDoc | None:
    """The record of a save that writes everything."""
    return _Tokens(selection, counts, before).record(None) if counts else None


def fits(record: ExpertsDoc, counts: Mapping[str, Sequence[int]]) -> bool:
    """Whether counts may be those of the same training later."""
    return {layer: len(doc.seen) for layer, doc in record.layers.items()} == {
        layer: len(of_layer) for layer, of_layer in counts.items()
    } and all(
        now >= then
        for layer, doc in record.layers.items()
        for now, then in zip(counts[layer], doc.seen, strict=True)
    )


class _Tokens:
    """How many tokens experts were given, and of how many what is stored of them has learned.

    After a failure, experts that were older in the checkpoint have lost what they had learned since.
    So what the program's own experts have learned of is counted, too.

    Args:
        counts: by layer, since training began.
    """

    def __init__(
        self,
        selection: Selection,
        counts: Mapping[str, Sequence[int]],
        before: RecordBefore,
    ) -> None:
        self._counts, self._selection = counts, selection
        self.before, self._resumed = before.record, before.resumed
        if not selection.has_base:
            return
        layers = {layer: len(experts) for layer, experts in selection.layers.items()}
        given = {layer: len(of_layer) for layer, of_layer in counts.items()}
        if layers != given:
            name = min((layers.items() ^ given.items()), default=("", 0))[0]
            raise UsageError(
                f"tokens has {given.get(name, 'no')} counts of {name!r}, which has {layers.get(name, 'no')} experts",
                hint=f"counts of each expert, by {', '.join(layers)}"[:500],
            )
        if (
            self.before is not None
            and {layer: len(doc.seen) for layer, doc in self.before.layers.items()} != given
        ):
            self.before = None
        for layer, doc in self.before.layers.items() if self.before is not None else ():
            for number, (now, then) in enumerate(zip(counts[layer], doc.seen, strict=True)):
                if now < then:
                    raise UsageError(
                        f"tokens[{layer!r}][{number}] is {now}, and was {then} in the base",
                        hint="count on from the counts at the checkpoint that was loaded: keep them in the state",
                    )

    def _held(self, layer: str, index: int) -> int:
        """Of how many tokens the program's expert has learned."""
        seen = self._counts[layer][index]
        if self.before is None:
            return seen
        doc = self.before.layers[layer]
        learned = doc.stored if self._resumed else doc.held
        return learned[index] + seen - doc.seen[index]

    def _stored(self, layer: str, index: int, saved: frozenset[Place] | None) -> int:
        if self.before is None or saved is None:
            return self._held(layer, index)
        place = self._selection.layers[layer][index].place
        stored = self.before.layers[layer].stored[index]
        return self._held(layer, index) if place in saved else stored

    def unsaved(self, expert: _Expert) -> int:
        """The tokens that are lost if the training goes on without saving an expert."""
        layer, index = expert.place.layer, expert.index
        return self._held(layer, index) - self._stored(layer, index, frozenset())

    def lost(self, saved: frozenset[Place] | None) -> float:
        """The share of lost tokens, the mean of layers, if these experts are saved (None: all)."""
        shares = [
            1 - sum(self._stored(layer, n, saved) for n in range(len(seen))) / max(1, sum(seen))
            for layer, seen in self._counts.items()
            if sum(seen)
        ]
        return sum(shares) / max(1, len(self._counts))

    def record(self, saved: frozenset[Place] | None) -> ExpertsDoc:
        """What a checkpoint records of which these experts are saved (None: all)."""
        layers = {
            layer: ExpertLayerDoc(
                seen=tuple(seen),
                held=tuple(self._held(layer, n) for n in range(len(seen))),
                stored=tuple(self._stored(layer, n, saved) for n in range(len(seen))),
            )
            for layer, seen in self._counts.items()
        }
        return ExpertsDoc(lost=self.lost(saved), layers=layers)
