"""Matches the tensors of a training state with stored tensors, and collects all mismatches; the lineage of a load."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ucformat.errors import StateMismatch, UsageError, first_lines
from ucformat.geometry.patterns import compile_pattern, expand
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.jobs.record import lineage_to
from ucformat.reading.readable import PART_OF
from ucformat.schema import TORCH_NUMBERS
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.url import as_strings
from ucformat.torch.comm.wire import message
from ucformat.torch.state.elements import blocks_of, span

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.box import Box
    from ucformat.schema.manifest import LineageDoc, ReaderDoc
    from ucformat.torch.state.local import LocalShard

    Rename = Callable[[str], str] | Mapping[str, str]
    Strict = Literal["report", "weights", True, False] | list[str] | tuple[str, ...]


# Finds tensors that share memory, without touching it.


_MAX_WORK = 1 << 16  # of NumPy's exact test; what takes longer is taken for shared


class Shared(NamedTuple):
    """The numbers of two targets that share memory, and whether they are the same view of it."""

    first: int
    second: int
    same: bool


class _Region(NamedTuple):
    """A box of a target in memory: addresses and strides in bytes."""

    device: str
    low: int
    high: int
    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    target: int


def sharing(targets: Sequence[LocalShard]) -> Iterator[Shared]:
    """Yield pairs of targets that share memory; each target that is one with an earlier view only with that one."""
    if not _spans_meet(targets):
        return
    first: dict[tuple[object, ...], _Region] = {}
    for number, target in enumerate(targets):
        for region in _regions(number, target):
            earlier = first.setdefault(region[:-1], region)
            if earlier.target != number:
                yield Shared(earlier.target, number, same=True)
    reaching: list[_Region] = []
    # by device and address: only regions that reach beyond the start of this one can meet it
    for region in sorted(first.values()):
        reaching = [r for r in reaching if r.device == region.device and r.high > region.low]
        for other in reaching:
            if other.target != region.target and _meet(other, region):
                yield Shared(
                    min(other.target, region.target), max(other.target, region.target), same=False
                )
        reaching.append(region)


def _spans_meet(targets: Iterable[LocalShard]) -> bool:
    """Whether any two targets have bytes in common between their first elements and their last ones."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + span(t.shape, t.stride(), t.element_size()))
        for t in (target.tensor for target in targets if target.pieces)
        if not t.is_meta
    )
    return any(stop > start for (_, stop), (start, _) in pairwise(spans))


def _regions(number: int, target: LocalShard) -> Iterator[_Region]:
    tensor, itemsize = target.tensor, target.tensor.element_size()
    if tensor.is_meta or not tensor.numel() or not target.pieces:
        return
    boxes = [(p.offset, p.box.shape, p.strides) for p in target.pieces]
    if tensor.device.type != "cpu":  # whose pieces do not follow its strides
        boxes = [(0, tuple(tensor.shape), tensor.stride())]
    for offset, shape, strides in boxes:
        dims = [(n, s * itemsize) for n, s in zip(shape, strides, strict=True) if n != 1]
        at = tensor.data_ptr() + offset * itemsize
        span = sum((n - 1) * s for n, s in dims)
        sizes, steps = tuple(n for n, _ in dims), tuple(s for _, s in dims)
        yield _Region(
            str(tensor.device),
            at,
            at + span + itemsize,
            at,
            sizes,
            steps,
            itemsize,
            str(tensor.dtype),
            number,
        )


def _meet(a: _Region, b: _Region) -> bool:
    shares: Any = np.shares_memory  # whose stub allows no limit
    try:
        return bool(shares(_array(a), _array(b), max_work=_MAX_WORK))
    except np.exceptions.TooHardError:
        return True


def _array(region: _Region) -> np.ndarray:
    """An array in the place of a region, which is never read."""

    class Interface:
        __array_interface__: dict[str, Any] = {  # noqa: RUF012 - read once
            "version": 3,
            "data": (region.at, True),
            "shape": region.shape,
            "strides": region.strides,
            "typestr": f"|V{region.itemsize}",
        }

    return np.asarray(Interface())


__all__ = [
    "PARAMETER",
    "AskedTensors",
    "Matched",
    "Problems",
    "asked_tensors",
    "dropped_problems",
    "edge_of",
    "holds_training",
    "labels_of",
    "match",
    "overlaps",
    "parameter_of",
    "raise_for",
    "renamed_keys",
    "stored_names",
]


PARAMETER = ("weight", "master")  # the states of a parameter itself, not of an optimizer


@dataclass(frozen=True, slots=True)
class Problems:
    """The mismatches of a state and a checkpoint, as lines that name a tensor, an object or a group.

    `missing` are in the state only, `unexpected` in the checkpoint only. `shapes` and `dtypes`
    differ. `others` cannot be restored for the given reason. `inexact` is not as it was saved:
    values that lost their classes, and hyper-parameters of the program that were not saved.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()

    def __or__(self, other: Problems) -> Problems:
        """All problems, each once."""
        return Problems(
            *(
                tuple(dict.fromkeys((*getattr(self, f.name), *getattr(other, f.name))))
                for f in fields(self)
            )
        )

    def of(self, strict: Any) -> tuple[Problems, Problems]:
        """Return the problems of what must be complete, and the others."""
        if strict in ("report", True, False):
            return self, Problems()
        kinds = [(f.name, getattr(self, f.name)) for f in fields(self)]
        asked, others = (
            Problems(
                **{
                    kind: tuple(line for line in lines if _is_of(line, strict) is chosen)
                    for kind, lines in kinds
                }
            )
            for chosen in (True, False)
        )
        return asked, others

    def lines(self, *, unexpected: bool) -> list[str]:
        """Return one line for each problem.

        Args:
            unexpected: include what only the checkpoint has, and what is inexact.
        """
        out = [f"missing: {m}" for m in self.missing]
        out += [f"different shape: {m}" for m in self.shapes]
        out += [f"different dtype: {m}" for m in self.dtypes]
        out += self.others
        if unexpected:
            out += [f"unexpected: {m}" for m in self.unexpected]
            out += self.inexact
        return out


_TENSOR = re.compile(r"(.*?) \(([^()]+)\)(?: is | in the checkpoint |$)")
_VALUE = re.compile(r"the (?:object|per-rank value) (.*?)(?:: | is | cannot |$)")
_GROUP = re.compile(
    r"(?:the hyper-parameter .*? of )?(?:group \d+ of (.*?)|optimizer group \d+)(?:: | was | is |$)"
)


def _is_of(line: str, strict: str | Sequence[str]) -> bool:
    """Whether a problem is one of what must be complete: of a weight, or of what a pattern names."""
    if tensor := _TENSOR.match(line):
        name, state = tensor.groups()
        if strict == "weights":
            return state in PARAMETER
        return any(fits(text, *as_strings(strict)) for text in (name, f"{name}.{state}"))
    value = _VALUE.match(line) or _GROUP.match(line)
    if value is None:  # of several tensors, or of one that cannot be loaded as it is
        return True
    # engines have one optimizer, which has no path
    return strict != "weights" and fits(value[1] or "optimizer", *as_strings(strict))


def fits(text: str, *patterns: str) -> bool:
    """Check whether a name or path is that of a pattern, lies below it, or matches it as a glob."""
    return any(
        text == pattern or text.startswith(pattern.rstrip(".") + ".") or fnmatchcase(text, pattern)
        for pattern in patterns
    )


@dataclass(frozen=True, slots=True)
class Matched:
    """A tensor of the state, and the stored tensor from which it is read, cast if the dtypes differ."""

    target: LocalShard
    stored: TensorInfo


def stored_names(ck: Checkpoint, rename: Rename | None) -> dict[str, str]:
    """Return the name under which each tensor is stored, by its name in the state; includes tied names.

    Args:
        rename: maps names of the checkpoint to names of the state: a function, or `{regex:
            replacement}`, of which the first that matches a whole name applies. A name that another
            tensor has is taken from it.
    """
    all_names = {n: n for n in ck.names()} | dict(ck.aliases)
    if rename is None:
        return all_names
    new_name_of = rename if callable(rename) else _by_regex(rename)
    new_names = {name: new_name_of(name) for name in all_names}
    renamed: dict[str, str] = {}
    for name, new in new_names.items():
        if new != name and renamed.setdefault(new, stored := all_names[name]) != stored:
            raise UsageError(
                f"`rename` maps both {renamed[new]!r} and {name!r} to {new!r}",
                hint="map them to two names",
            )
    return {new: renamed.get(new, all_names[name]) for name, new in new_names.items()}


def _by_regex(rules: Mapping[str, str]) -> Callable[[str], str]:
    compiled = [(compile_pattern(pattern), replacement) for pattern, replacement in rules.items()]

    def rename(name: str) -> str:
        pair = next(
            (
                (m, replacement)
                for pattern, replacement in compiled
                if (m := pattern.fullmatch(name))
            ),
            None,
        )
        return expand(*pair) if pair else name

    return rename


@gc_paused()
def match(
    targets: Sequence[LocalShard],
    aliases: Mapping[str, str],
    ck: Checkpoint,
    names: Mapping[str, str],
    *,
    cast: bool,
    as_lazy: bool = False,
) -> tuple[list[Matched], Problems, set[Key]]:
    """Match each target with the stored tensor from which it is read.

    A float32 weight or a `master` is read from `master` if that is stored, else from `weight`.

    Args:
        aliases: further names of tied targets, and the names in `targets`; a target that is not
            stored under its name is read under one of these.

    Returns:
        the matches, all mismatches but what is unexpected, and which stored tensors targets mean.
    """
    matched: list[Matched] = []
    missing, shapes, dtypes, others = [], [], [], []
    dropped: dict[str, None] = {}
    meant: set[Key] = set()
    tensors = ck.tensors
    aliases_of: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        aliases_of.setdefault(name, []).append(alias)
    for target in targets:
        info = target.info
        known_as = (info.name, *aliases_of.get(info.name, ()))
        stored = _find(known_as, None if as_lazy else info, tensors, names)
        if stored is None:
            missing.append(str(info.key))
            unread = [
                Key(n, s)
                for n in known_as
                for s in (PARAMETER if info.state in PARAMETER else (info.state,))
            ]
            others += [
                f"{key} in the checkpoint {why}"
                for key in unread
                if (why := ck.unreadable.get(key))
            ]
            dropped |= dict.fromkeys(key.state for key in unread if key.state in ck.dropped)
            continue
        if info.state in PARAMETER:
            meant.update([Key(stored.name, s) for s in PARAMETER])
        else:
            meant.add(stored.key)
        if stored.shape != info.shape:
            shapes.append(
                f"{info.key} is {list(info.shape)}, in the checkpoint {list(stored.shape)}"
            )
        elif stored.dtype != info.dtype and not (
            cast and not target.wrapper and {stored.dtype, info.dtype} <= TORCH_NUMBERS
        ):
            dtypes.append(
                f"{info.key} is {info.dtype}, in the checkpoint {stored.dtype} ({stored.state})"
            )
        else:
            matched.append(Matched(target, stored))
    matched = _whole_wrappers(matched, targets)
    for alias, name in aliases.items():
        stored_alias, stored_first = names.get(alias), names.get(name)
        if stored_alias is not None and stored_first is not None and stored_alias != stored_first:
            boxes = [
                p.box
                for t in targets
                if t.info.name == name and t.info.state in PARAMETER
                for p in t.pieces
            ]
            if not _equal(ck, stored_alias, stored_first, boxes):
                others.append(
                    f"tied here: {alias} is {name}, but the checkpoint has two tensors, which "
                    "differ"
                )
        if stored_alias is not None:
            meant |= {Key(stored_alias, s) for s in PARAMETER}
    shared = overlaps([m.target for m in matched], [m.stored for m in matched], ck)
    if shared:
        others += shared.values()
        matched = [m for n, m in enumerate(matched) if not any(n in pair for pair in shared)]
    problems = Problems(tuple(missing), (), tuple(shapes), tuple(dtypes), tuple(others))
    return matched, problems | dropped_problems(ck, dropped), meant


def dropped_problems(ck: Checkpoint, states: Iterable[str]) -> Problems:
    """Return that these states were dropped by `thin`, and how to load without them."""
    weights_remain = any(key.state in PARAMETER for key in ck.tensors)
    advice = "; pass the model without its optimizer to load the weights" if weights_remain else ""
    return Problems(
        others=tuple(
            f"tensors ({s}) in the checkpoint were {ck.dropped[s]}{advice}" for s in states
        )
    )


def overlaps(
    targets: Sequence[LocalShard], stored: Sequence[TensorInfo], ck: Checkpoint
) -> dict[tuple[int, int], str]:
    """Return which targets would be filled over each other, and why: their numbers, and a line."""
    out: dict[tuple[int, int], str] = {}
    for a, b, same in sharing(targets):
        target, second = targets[a], targets[b]
        if not same:
            out[a, b] = (
                f"{target.key} and {second.key} share memory, but not as the same view: one would "
                "be filled over the other; give one of them memory of its own, or leave it out"
            )
        elif (
            stored
            and stored[a].key != stored[b].key
            and not _equal_values(ck, stored[a], stored[b], [p.box for p in target.pieces])
        ):
            out[a, b] = (
                f"{target.key} and {second.key} share memory, but the checkpoint has two tensors, "
                "which differ"
            )
    return out


def _whole_wrappers(matched: list[Matched], targets: Sequence[LocalShard]) -> list[Matched]:
    """The matches without those inside a wrapper of which another tensor has none."""
    fitting = {id(m.target) for m in matched}
    partial = {t.wrapper for t in targets if t.wrapper and id(t) not in fitting}
    return [m for m in matched if m.target.wrapper not in partial] if partial else matched


def parameter_of(name: str, ck: Checkpoint) -> list[TensorInfo]:
    """Return the stored weight and master of a parameter, if any; `ck[name]` reads the first."""
    return _parameter_in(ck.tensors, name)


def _parameter_in(tensors: Mapping[Key, TensorInfo], name: str) -> list[TensorInfo]:
    return [i for s in PARAMETER if (i := tensors.get(Key(name, s))) is not None]


def _find(
    known_as: Iterable[str],
    info: TensorInfo | None,
    tensors: Mapping[Key, TensorInfo],
    names: Mapping[str, str],
) -> TensorInfo | None:
    """The stored tensor from which one of the state is read, under the first of its names that has one.

    Args:
        info: the tensor of the state (None: the one that is read by name alone).
    """
    for name in known_as:
        if (stored_name := names.get(name)) is None:
            continue
        if info is not None and info.state not in PARAMETER:
            stored = tensors.get(Key(stored_name, info.state))
        elif parameters := _parameter_in(tensors, stored_name):
            stored = parameters[0] if info is None else _fitting(parameters, info)
        else:
            continue
        if stored is not None:
            return stored
    return None


def _fitting(parameters: Sequence[TensorInfo], info: TensorInfo) -> TensorInfo:
    """The one of a weight and its master from which a parameter of the state is read."""
    last = info.dtype == "float32" or info.state == "master"
    ordered = parameters[::-1] if last else parameters
    return next((i for i in ordered if i.dtype == info.dtype), ordered[0])


def _equal(ck: Checkpoint, a: str, b: str, boxes: Sequence[Box]) -> bool:
    """Whether two stored weights are equal: by their digests, or without these in the boxes that this rank holds."""
    infos_a, infos_b = parameter_of(a, ck), parameter_of(b, ck)
    return [i.state for i in infos_a] == [i.state for i in infos_b] and all(
        _equal_values(ck, i, j, boxes) for i, j in zip(infos_a, infos_b, strict=True)
    )


def _equal_values(ck: Checkpoint, a: TensorInfo, b: TensorInfo, boxes: Sequence[Box]) -> bool:
    """Whether two stored tensors are equal, as for `_equal`."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    table = ck.manifest.tensors
    doc_a, doc_b = (
        next(t for t in map(table.__getitem__, table.rows(i.name)) if t.state == i.state)
        for i in (a, b)
    )
    if doc_a.digest and (doc_a.chunk, doc_a.digest) == (doc_b.chunk, doc_b.digest):
        return True
    tensors = ck[a.name, a.state], ck[b.name, b.state]
    for box in boxes:
        for block in blocks_of(box, a.itemsize):
            where = tuple(slice(x, x + n) for x, n in zip(block.start, block.shape, strict=True))
            if tensors[0][where].tobytes() != tensors[1][where].tobytes():
                return False
    return True


@message
class AskedTensors:
    """Which tensors of a checkpoint some ranks ask for, and for which they have a place: a bit for each.

    What one rank asks for another may have, and a rank need not ask for what it lacks.
    """

    asked: NDArray[np.uint8]
    placed: NDArray[np.uint8]

    def __or__(self, other: AskedTensors) -> AskedTensors:
        return AskedTensors(self.asked | other.asked, self.placed | other.placed)

    def unexpected(self, count: int) -> NDArray[np.bool_]:
        """Return of each of `count` tensors whether it is asked for, and has no place."""
        return np.unpackbits(self.asked & ~self.placed, count=count).astype(np.bool_)

    def has_place(self, count: int) -> NDArray[np.bool_]:
        """Return of each of `count` tensors whether a rank has a place for it."""
        return np.unpackbits(self.placed, count=count).astype(np.bool_)


@gc_paused()
def asked_tensors(
    ck: Checkpoint,
    meant: Collection[Key],
    targets: Iterable[LocalShard],
    *,
    optimizer: bool = False,
    inside: Callable[[Key], bool] = lambda _: False,
) -> AskedTensors:
    """Return which stored tensors are of a kind that a state has, and which of all tensors it has.

    Args:
        meant: what `match` returned for the targets.
        optimizer: whether the state has an optimizer even if that has no states.
        inside: tells what it asks for whatever it has.
    """
    kinds = {t.info.state not in PARAMETER for t in targets} | ({True} if optimizer else set())
    asked = ((k.state not in PARAMETER) in kinds or inside(k) for k in ck.tensors)
    placed = (k in meant for k in ck.tensors)
    count = len(ck.tensors)
    return AskedTensors(*(np.packbits(np.fromiter(b, np.bool_, count)) for b in (asked, placed)))


@gc_paused()
def renamed_keys(keys: Iterable[Key], names: Mapping[str, str]) -> list[Key]:
    """Return the names and states that tensors of a checkpoint have in the state."""
    # reversed, so that of tied names the first one stays
    renamed = {stored: name for name, stored in reversed(list(names.items()))}
    return [Key(renamed.get(key.name, key.name), key.state) for key in keys]


def labels_of(keys: Iterable[Key], names: Mapping[str, str]) -> list[str]:
    """Return what `Problems` call tensors of a checkpoint."""
    return list(map(str, renamed_keys(keys, names)))


_MAX_LINES = 40


def raise_for(problems: Problems, strict: Strict, url: str, *, complete: bool = False) -> None:
    """Raise one error with all problems, before anything is read.

    Args:
        complete: refuse what only the checkpoint has, too, where there is no argument `strict`.
        strict: True refuses what only the checkpoint has, and what is inexact, too; False ignores
            all problems.
    """
    lines = problems.lines(unexpected=complete or strict is True)
    if strict is False or not lines:
        return
    hints = ["publish what the state has" if complete else "strict=False loads what fits"]
    if complete and problems.unexpected:
        hints.append("leave= names what has no place in the state")
    if problems.dtypes:
        hints.append("cast=True casts")
    if problems.missing:
        hints.append("rename= maps the checkpoint's names to yours")
    if problems.missing and not complete:
        hints.append('strict="weights", or a list of names, says what must be complete')
    raise StateMismatch(
        f"{url} does not fit the state to be loaded; nothing was changed:\n  "
        + "\n  ".join(first_lines(lines, _MAX_LINES)),
        hint="; ".join(hints),
    )


_DEFAULT_DEGREES = {"zero": 0, "tp": 1, "pp": 1, "ep": 1}  # that engines record in their own files


def holds_training(ck: Checkpoint) -> bool:
    """Check whether a checkpoint contains optimizer states, or groups, which exist before the first step."""
    return bool(ck.manifest.groups) or any(key.state not in PARAMETER for key in ck.tensors)


def edge_of(
    ck: Checkpoint,
    now: Mapping[str, Any],
    *,
    continues: bool,
    readers: tuple[ReaderDoc, ...] = (),
) -> LineageDoc:
    """Return the lineage of a load.

    `finetune`, or if the training continues `resume`, or `reshard` to another layout.
    """
    before = ck.metadata.layout
    if "world" in before:  # saved by ucformat.torch, which records the whole layout
        relaid = {k: v for k, v in before.items() if k != PART_OF} != dict(now)
    else:  # files of an engine
        relaid = any(
            before[k] != now.get(k, _DEFAULT_DEGREES.get(k, now["world"]))
            for k in before.keys() & {*_DEFAULT_DEGREES, "dp"}
        )
    kind = ("reshard" if relaid else "resume") if continues else "finetune"
    return lineage_to(ck, kind).model_copy(update={"readers": readers})
