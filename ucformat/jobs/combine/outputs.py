"""The tensors of a combined checkpoint, and what its inputs must have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ucformat.errors import UsageError, first_names
from ucformat.geometry.placement import compile_match
from ucformat.geometry.tensor import Key
from ucformat.jobs.combine.methods import REAL
from ucformat.reading.readable import check_exact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_NAMED = 5  # tensors that an error names
_HINT = "--take PATTERN (take=) keeps such tensors as they are in the first input; a view renames or drops them"


@dataclass(frozen=True, slots=True)
class CombinedTensor:
    """A tensor of a combined checkpoint.

    Attributes:
        how: whether it is combined; `equal` in all inputs, which is checked, since it has no
            floating-point numbers, or numbers of float8 that need scales; or taken from the first.
        inputs: the tensor in each input, which may have it under another tied name; those of
            adapters are found otherwise.
    """

    info: TensorInfo
    how: Literal["combined", "equal", "taken"]
    inputs: tuple[TensorInfo, ...]


def find_outputs(
    sources: Sequence[Checkpoint],
    states: Sequence[str] | None,
    take: Iterable[str],
    cast: str | None,
) -> list[CombinedTensor]:
    """Find the tensors to combine."""
    if cast is not None and cast not in REAL:
        there = ", ".join(sorted(REAL))
        raise UsageError(
            f"{cast!r} is no dtype of floating-point numbers", hint=f"there are: {there}"
        )
    take = tuple(take)
    patterns = [compile_match(pattern) for pattern in take]

    def taken(name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in patterns)

    first, *others = sources
    chosen = _chosen(first, states)
    if not chosen:
        raise UsageError(
            f"{first.home} has no tensors to combine", hint="`ucp show` lists its states"
        )
    mine = {key: info for key, info in chosen.items() if not taken(key.name)}
    combined: list[dict[Key, TensorInfo]] = [mine]
    for other in others:
        called = _called(first, other)
        chosen_there = {
            key._replace(name=called.get(key.name, key.name)): i
            for key, i in _chosen(other, states).items()
        }
        theirs = {key: info for key, info in chosen_there.items() if not taken(key.name)}
        _must_match(first, other, mine, theirs)
        _must_be_tied_alike(first, other, called, taken)
        combined.append(theirs)
    for pattern, text in zip(patterns, take, strict=True):
        if not any(
            pattern.fullmatch(name) for ck in sources for name in (*ck.names(), *ck.aliases)
        ):
            raise UsageError(
                f"no tensor has a name like {text!r}", hint="`ucp show` lists the names"
            )
    scaled = scaled_modules(first)
    return [
        _output([infos[key] for infos in combined], cast, scaled)
        if key in mine
        else CombinedTensor(info, "taken", (info,))
        for key, info in chosen.items()
    ]


def scaled_modules(ck: Checkpoint) -> set[str]:
    """Return the modules that have tensors of scales: their float8 weights mean something only with these."""
    parts = (name.rpartition(".") for name in ck.names())
    return {module for module, _, own in parts if "scale" in own}


def is_scaled(info: TensorInfo, scaled: set[str]) -> bool:
    """Check whether a tensor is quantized to float8, with scales beside it."""
    return info.dtype.startswith("float8") and info.name.rpartition(".")[0] in scaled


def _output(infos: Sequence[TensorInfo], cast: str | None, scaled: set[str]) -> CombinedTensor:
    info = infos[0]
    if info.dtype not in REAL or is_scaled(info, scaled):
        return CombinedTensor(info, "equal", tuple(infos))
    return CombinedTensor(
        info if cast is None else replace(info, dtype=cast), "combined", tuple(infos)
    )


def _chosen(ck: Checkpoint, states: Sequence[str] | None) -> dict[Key, TensorInfo]:
    """The tensors by name and state; by default the state is empty, since it may be another one in each input."""
    used = ("weight", "master") if states is None else states
    ck.check_readable(used)
    # though the caller may read them: what is made of them would not tell
    exact = ck.metadata.replace(lossy_allowed=False, older_allowed=False)
    check_exact(exact, (key for key in ck.tensors if key.state in used), ck.url)
    if states is not None:
        lacking = [s for s in states if not any(key.state == s for key in ck.tensors)]
        if lacking:
            raise UsageError(
                f"{ck.home} has no tensors in the state {', '.join(lacking)}",
                hint="`ucp show` lists its states",
            )
        return {key: info for key, info in ck.tensors.items() if key.state in states}
    out = {}
    for name in ck.names():
        state = next((s for s in ("weight", "master") if s in ck.states(name)), None)
        if state is not None:
            out[Key(name, "")] = ck.tensors[Key(name, state)]
    return out


def _must_match(
    first: Checkpoint, other: Checkpoint, mine: dict[Key, TensorInfo], theirs: dict[Key, TensorInfo]
) -> None:
    for has_all, lacks_some, has, lacks in (
        (first, other, mine, theirs),
        (other, first, theirs, mine),
    ):
        missing = [key for key in has if key not in lacks]
        if missing:
            raise UsageError(
                f"{lacks_some.home} lacks tensors of {has_all.home}: "
                f"{first_names(map(_name, missing), _NAMED)}",
                hint=_HINT,
            )
    shapes = [key for key, info in mine.items() if info.shape != theirs[key].shape]
    if shapes:
        pairs = (f"{_name(k)} {mine[k].shape} and {theirs[k].shape}" for k in shapes)
        raise UsageError(
            f"tensors of {first.home} and {other.home} differ in shape: "
            f"{first_names(pairs, _NAMED)}",
            hint=_HINT,
        )
    kinds = [
        key
        for key, info in mine.items()
        if info.dtype != theirs[key].dtype
        and not (info.dtype in REAL and theirs[key].dtype in REAL)
    ]
    if kinds:
        pairs = (f"{_name(k)} {mine[k].dtype} and {theirs[k].dtype}" for k in kinds)
        raise UsageError(
            f"tensors of {first.home} and {other.home} differ in dtype: "
            f"{first_names(pairs, _NAMED)}",
            hint=_HINT,
        )


def _called(first: Checkpoint, other: Checkpoint) -> dict[str, str]:
    """The name under which the first input stores what another one stores under another of its tied names."""
    names = ((name, first.aliases.get(name)) for name in other.names())
    return {
        name: there
        for name, there in names
        if there is not None and other.aliases.get(there) == name
    }


def _must_be_tied_alike(
    first: Checkpoint, other: Checkpoint, called: dict[str, str], taken: Callable[[str], bool]
) -> None:
    renamed = {a: called.get(n, n) for a, n in other.aliases.items() if called.get(n) != a} | called
    mine, theirs = (
        {a: n for a, n in aliases.items() if not taken(a)} for aliases in (first.aliases, renamed)
    )
    if mine != theirs:
        names = sorted(a for a in mine.keys() | theirs.keys() if mine.get(a) != theirs.get(a))
        raise UsageError(
            f"tensors are tied in {first.home} otherwise than in {other.home}: "
            f"{first_names(names, _NAMED)}",
            hint="a view (--view) with the steps `alias` or `untie` makes them alike",
        )


def _name(key: Key) -> str:
    return str(key) if key.state else key.name
