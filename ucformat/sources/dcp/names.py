"""From the paths of a training state to the names and states of tensors: one rule for saving and for loading.

`{"model": …, "optim": {"state": {"a.weight": {"exp_avg": t}}, "param_groups": […]}}` and its flattened spellings
(`optim.state.a.weight.exp_avg`) all mean the tensor `a.weight` in the states `weight` and `exp_avg`, as every other
engine's checkpoint has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import StatePath as Path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    Shape = tuple[int, ...]

__all__ = [
    "GROUPS",
    "Naming",
    "Path",
    "dotted",
    "find_owners",
    "key_of_dotted",
    "name_state",
    "optimizer_roots",
    "split_option",
    "split_state",
]


GROUPS = "param_groups"
_STATE = "state"
#: The keys under which programs keep the model, where nothing else tells which of several it is.
_MODELS = ("model", "module", "state_dict", "model_state_dict", "net")


def dotted(path: Path) -> str:
    """A path as text."""
    return ".".join(map(str, path))


def optimizer_roots(paths: Iterable[Path]) -> set[Path]:
    """Where the optimizers of a state lie: what comes before `param_groups`, nested or flattened."""
    roots: set[Path] = set()
    for path in paths:
        for i, part in enumerate(path):
            if part == GROUPS or (isinstance(part, str) and part.startswith(GROUPS + ".")):
                roots.add(path[:i])
                break
    return roots


@dataclass(frozen=True, slots=True)
class Naming:
    """How a training state is named: each tensor, and what the names of each optimizer's parameters begin with."""

    keys: dict[Path, Key]
    prefixes: dict[Path, str]


def name_state(
    tensors: Mapping[Path, Shape | None],
    optimizers: Iterable[Path],
    owners: Mapping[Path, Path] | None = None,
    listed: Mapping[Path, Collection[str]] | None = None,
) -> Naming:
    """The name and state of each tensor of a training state, by its path.

    Below an optimizer, `state`, a parameter's name and a state's name (one part each, or joined by dots) are that
    state of that parameter. All else is in the state `weight`, and named by its path: below the model without the
    model's own. The model is the one that the optimizers train (`find_owners`); of several the one called `model` or
    the like; where no optimizer tells, the only mapping of tensors, else the one called so. An optimizer's parameters
    are named as those of its own model are. No two tensors get one name: where they would, nothing is taken off the
    weights' paths, and before the names of optimizers that would meet stands what they are called.

    Args:
        tensors: the shape of each, by path; None where it is not known.
        optimizers: where they lie.
        owners: where the model of an optimizer lies, where that is known.
        listed: names of parameters in the groups of an optimizer, which count where it has no states.
    """
    roots = sorted(optimizers, key=lambda root: (-len(root), dotted(root)))
    states: dict[Path, tuple[Path, str, str]] = {}
    leaves = {str(p[-1]) for p in tensors}
    for path in tensors:
        root = next((r for r in roots if path[: len(r)] == r), None)
        found = None if root is None else _optimizer_state(path[len(root) :], leaves)
        if root is not None and found is not None:
            states[path] = (root, *found)
    weights = {p: shape for p, shape in tensors.items() if p not in states}
    params: dict[Path, dict[str, set[Shape]]] = {root: {} for root in roots}
    for path, (root, name, _) in states.items():
        shapes = params[root].setdefault(name, set())
        if shape := tensors[path]:
            shapes.add(shape)
    for root, names in (listed or {}).items():
        params[root] = params.get(root) or {n: set() for n in names}
    models = find_owners(weights, {r: p for r, p in params.items() if p}, owners)
    model = _stripped({m for r, m in models.items() if m not in (None, r)}, weights)
    if model is not None:
        below = {p: dotted(p[len(model) :] if p[: len(model)] == model else p) for p in weights}
        if len(set(below.values())) < len(below):
            model = None
    out = {p: Key(dotted(_without(p, model)), "weight") for p in weights}
    prefixes = {r: dotted((*_without(m, model), "")) if (m := models.get(r)) else "" for r in roots}
    met: dict[tuple[str, str], set[Path]] = {}
    for root, name, state in states.values():
        met.setdefault((prefixes[root] + name, state), set()).add(root)
    prefixes |= {r: dotted((*r, "")) for some in met.values() if len(some) > 1 for r in some if r}
    taken = set(out.values())
    for path, (root, name, state) in states.items():
        key = Key(prefixes[root] + name, state)
        out[path] = key if key not in taken else Key(dotted(path), "weight")
        taken.add(out[path])
    return Naming({p: out[p] for p in tensors}, prefixes)


def _without(path: Path, model: Path | None) -> Path:
    return path[len(model) :] if model is not None and path[: len(model)] == model else path


def _optimizer_state(below: Path, leaves: Collection[str]) -> tuple[str, str] | None:
    """The parameter and its state that a path below an optimizer means."""
    found: tuple[str, str] | None = None
    if len(below) >= 3 and below[0] == _STATE:
        name = below[1]
        found = None if isinstance(name, int) or name.isdigit() else (name, dotted(below[2:]))  # numbers name nothing
    elif len(below) == 1 and str(below[0]).startswith(_STATE + "."):
        found = split_state(str(below[0])[len(_STATE) + 1 :], leaves)
    return None if found is None or found[1] == "weight" else found


def split_option(key: str) -> tuple[str, str]:
    """The parameter and the hyper-parameter that a key of a flattened optimizer state dict means; else empty."""
    name, _, option = key[len(GROUPS) + 1 :].rpartition(".")
    return (name, option) if key.startswith(GROUPS + ".") else ("", "")


def split_state(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """A parameter's name and a state's, joined by a dot: after a name that is known, else at the last dot."""
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if text[:at] in names and not text[:at].isdigit():
            return text[:at], text[at + 1 :]
    name, dot, state = text.rpartition(".")
    return (name, state) if dot and not name.isdigit() else None


def _stripped(owners: Collection[Path], weights: Iterable[Path]) -> Path | None:
    """The model whose own path the names of weights do not have; None where nothing tells which it is."""
    among = owners or {p[:-1] for p in weights}
    if len(among) == 1 and (owners or not any(isinstance(p[-1], int) for p in weights)):
        return next(iter(among))
    called = [p for p in among if p and p[-1] in _MODELS]
    return called[0] if len(called) == 1 else None


def key_of_dotted(text: str, states: Mapping[str, Collection[str]]) -> Key | None:
    """The stored tensor that a flattened path of some program means; `states` are those of each name.

    The name may have in front the key under which the program keeps its model, or for an optimizer's states whatever
    it is called, then `state`.
    """
    for name in _without_model(text):
        if name in states:
            return Key(name, "weight")
    before, found, after = ("", _STATE, text[len(_STATE) + 1 :]) if text.startswith(_STATE + ".") else _cut(text)
    while found:
        split = split_state(after, states)
        if split is not None and split[0] in states:
            return Key(*split)
        more, found, after = _cut(after)
        before = f"{before}.{_STATE}.{more}"
    return None


def _cut(text: str) -> tuple[str, str, str]:
    return text.partition(f".{_STATE}.")


def _without_model(text: str) -> list[str]:
    """The name itself, and what is left of it without a leading `model.`, `app.model.` and the like."""
    out = [text]
    parts = text.split(".")
    out += [".".join(parts[i + 1 :]) for i in range(min(2, len(parts) - 1)) if parts[i] in _MODELS]
    return out


def find_owners(
    weights: Mapping[Path, Shape | None],
    params: Mapping[Path, Mapping[str, Collection[Shape]]],
    told: Mapping[Path, Path] | None = None,
) -> dict[Path, Path | None]:
    """Where the model of each optimizer lies: the mapping below which all parameters are that the optimizer names.

    Of several it is the only one whose weights have the shapes of the states; else the only one that is called as the
    optimizer is (`netG` and `optimizerG`), or `model` or the like, or that lies beside the optimizer. Where nothing of
    that tells, or two optimizers would hold the same parameter, it is the optimizer itself; None where there is no such
    mapping.

    Args:
        weights: the shape of each weight, by path; None where it is not known.
        params: the names of each optimizer's parameters, and the shapes of the states of each.
        told: owners that are known.

    Raises:
        UsageError: one that is told does not hold all that its optimizer names.
    """
    held: dict[Path, dict[str, Shape | None]] = {}
    for path, shape in weights.items():
        for i in range(len(path)):
            held.setdefault(path[:i], {})[dotted(path[i:])] = shape
    out: dict[Path, Path | None] = {}
    for root, names in params.items():
        owner = (told or {}).get(root)
        if owner is not None and not held.get(owner, {}).keys() >= names.keys():
            raise UsageError(f"{dotted(owner)} does not hold all parameters that the optimizer {dotted(root)} names")
        out[root] = _owner(root, names, held) if owner is None else owner
    sure = told or {}
    for root, owner in list(out.items()):
        twins = [r for r in out if r != root and out[r] == owner and not params[r].keys().isdisjoint(params[root])]
        if owner is not None and twins and root not in sure:
            out |= {r: r for r in (root, *twins) if r not in sure}
    return out


def _owner(
    root: Path, names: Mapping[str, Collection[Shape]], held: Mapping[Path, Mapping[str, Shape | None]]
) -> Path | None:
    fitting = [p for p, have in held.items() if have.keys() >= names.keys()]
    alike = [p for p in fitting if all(held[p][n] in (None, *s) for n, s in names.items() if s)]
    fitting = alike or fitting
    for some in (
        fitting,
        [p for p in fitting if _words(p) and _words(p) == _words(root)],
        [p for p in fitting if p and p[-1] in _MODELS],
        [p for p in fitting if p[:-1] == root[:-1]],
    ):
        if len(some) == 1:
            return some[0]
    return root if fitting else None


_ANY = frozenset(["state", "dict", "optim", "optimizer", "optimizers", "opt"]).union(
    *([word, word + "s"] for word in ("model", "module", "net", "network"))
)


def _words(path: Path) -> frozenset[str]:
    """The words of a path that tell one model, or optimizer, from others."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", dotted(path))
    return frozenset(w.lower() for w in words) - _ANY
