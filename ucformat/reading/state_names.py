"""The names and states of the tensors in a training state, from their paths: one rule for saving and for loading.

`{"model": …, "optim": {"state": {"a.weight": {"exp_avg": t}}, "param_groups": […]}}` and its
flattened form (`optim.state.a.weight.exp_avg`) both contain the tensor `a.weight` in the states
`weight` and `exp_avg`, named as in the checkpoints of all other engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.geometry.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ucformat.reading.readable import StatePath as Path

    Shape = tuple[int, ...]

GROUPS = "param_groups"
_FLAT_GROUPS = f"{GROUPS}."
_STATE = "state"
#: Keys that programs use for the model: these decide if nothing else identifies it among several.
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "net")


def dotted(path: Path) -> str:
    """Join a path with dots."""
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:  # it has integers
        return ".".join(map(str, path))


def optimizer_roots(paths: Iterable[Path]) -> set[Path]:
    """Find the optimizers of a state: the paths of the mappings that contain `param_groups`, nested or flattened."""
    roots: set[Path] = set()
    for path in paths:
        for i, part in enumerate(path):
            if isinstance(part, str) and (part == GROUPS or part.startswith(_FLAT_GROUPS)):
                roots.add(path[:i])
                break
    return roots


@dataclass(frozen=True, slots=True)
class Naming:
    """The key of each tensor of a training state by path, and the prefix of each optimizer's parameter names."""

    keys: dict[Path, Key]
    prefixes: dict[Path, str]


def name_state(
    tensors: Mapping[Path, Shape | None],
    optimizers: Iterable[Path],
    owners: Mapping[Path, Path] | None = None,
    listed: Mapping[Path, Collection[str]] | None = None,
) -> Naming:
    """Name each tensor of a training state.

    Below an optimizer, `state`, the name of a parameter and the name of a state (as separate keys,
    or joined by dots) mean that state of that parameter. Everything else is in the state `weight`,
    and its name is its path, without the path of the model. The model is the one that the
    optimizers train (`_find_owners`); among several, the one with a key like `model`. If no
    optimizer identifies it, it is the only mapping of tensors, or the one with such a key. An
    optimizer's parameters are named like those of its own model. Names are unique: if removing the
    model's path would make two weights equal, it is not removed; if the parameters of two
    optimizers would be equal, the paths of the optimizers go in front.

    Args:
        tensors: the shape of each tensor, by path; None if it is not known.
        owners: the path of the model that each optimizer trains, by the optimizer's; only those
            that are known.
    """
    roots = sorted(optimizers, key=lambda root: (-len(root), dotted(root)))
    states: dict[Path, tuple[Path, str, str]] = {}
    # in a flat state dict the last key is the whole name of a parameter
    leaves = {str(p[-1]) for p in tensors} if roots else ()
    for path in tensors if roots else ():
        root = next((r for r in roots if path[: len(r)] == r), None)
        name_and_state = None if root is None else _optimizer_state(path[len(root) :], leaves)
        if root is not None and name_and_state is not None:
            states[path] = (root, *name_and_state)
    weights = {p: shape for p, shape in tensors.items() if p not in states} if states else tensors
    params: dict[Path, dict[str, set[Shape]]] = {root: {} for root in roots}
    for path, (root, name, _) in states.items():
        shapes = params[root].setdefault(name, set())
        if shape := tensors[path]:
            shapes.add(shape)
    for root, names in (listed or {}).items():
        params[root] = params.get(root) or {n: set() for n in names}
    optimized = {r: p for r, p in params.items() if p}
    models = _find_owners(weights, optimized, owners) if optimized else {}
    model = _main_model({m for r, m in models.items() if m not in (None, r)}, weights)
    names_below = {p: dotted(_without(p, model)) for p in weights}
    if model is not None and len(set(names_below.values())) < len(names_below):
        model = None
        names_below = {p: dotted(p) for p in weights}
    out = {p: Key(name, "weight") for p, name in names_below.items()}
    prefixes = {r: dotted((*_without(m, model), "")) if (m := models.get(r)) else "" for r in roots}
    users: dict[tuple[str, str], set[Path]] = {}
    for root, name, state in states.values():
        users.setdefault((prefixes[root] + name, state), set()).add(root)
    prefixes |= {
        r: dotted((*r, ""))
        for candidates in users.values()
        if len(candidates) > 1
        for r in candidates
        if r
    }
    used_keys = set(out.values())
    for path, (root, name, state) in states.items():
        key = Key(prefixes[root] + name, state)
        out[path] = key if key not in used_keys else Key(dotted(path), "weight")
        used_keys.add(out[path])
    return Naming({p: out[p] for p in tensors}, prefixes)


def _without(path: Path, model: Path | None) -> Path:
    return path[len(model) :] if model is not None and path[: len(model)] == model else path


def _optimizer_state(below: Path, leaves: Collection[str]) -> tuple[str, str] | None:
    """The parameter and its state at a path below an optimizer."""
    name_and_state: tuple[str, str] | None = None
    if len(below) >= 3 and below[0] == _STATE:
        name = below[1]
        # a number is no name
        name_and_state = (
            None if isinstance(name, int) or name.isdigit() else (name, dotted(below[2:]))
        )
    elif len(below) == 1 and str(below[0]).startswith(_STATE + "."):
        name_and_state = split_state(str(below[0])[len(_STATE) + 1 :], leaves)
    return None if name_and_state is None or name_and_state[1] == "weight" else name_and_state


def split_option(key: str) -> tuple[str, str]:
    """Split a key of a flattened optimizer state dict into a parameter and a hyper-parameter."""
    name, _, option = key[len(GROUPS) + 1 :].rpartition(".")
    return (name, option) if key.startswith(GROUPS + ".") else ("", "")


def split_state(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Split the name of a parameter and of a state, which are joined by a dot.

    Args:
        names: known names of parameters: the longest that `text` begins with is used; otherwise,
            the last dot splits.

    Returns:
        the parameter and the state; None if there is no name before the dot, or only a number.
    """
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if text[:at] in names and not text[:at].isdigit():
            return text[:at], text[at + 1 :]
    name, dot, state = text.rpartition(".")
    return (name, state) if dot and not name.isdigit() else None


def _main_model(owners: Collection[Path], weights: Iterable[Path]) -> Path | None:
    """The path of the model that is removed from the names of weights; None if no model can be identified."""
    candidates = owners or {p[:-1] for p in weights}
    if len(candidates) == 1 and (owners or not any(isinstance(p[-1], int) for p in weights)):
        return next(iter(candidates))
    named = [p for p in candidates if p and p[-1] in MODEL_KEYS]
    return named[0] if len(named) == 1 else None


def key_of_dotted(text: str, states: Mapping[str, Collection[str]]) -> Key | None:
    """Find the stored tensor for a flattened path of a program.

    The path may begin with the program's key for the model; for an optimizer state, with any keys
    for the optimizer, and then `state`.

    Returns:
        the key of the tensor; None if none matches.
    """
    for name in _without_model(text):
        if name in states:
            return Key(name, "weight")
    _, separator, after = f".{text}".partition(f".{_STATE}.")
    while separator:
        split = split_state(after, states)
        if split is not None and split[0] in states:
            return Key(*split)
        _, separator, after = after.partition(f".{_STATE}.")
    return None


def _without_model(text: str) -> list[str]:
    """A path as it is, and without a leading `model.`, `app.model.` and the like."""
    out = [text]
    parts = text.split(".")
    out += [
        ".".join(parts[i + 1 :]) for i in range(min(2, len(parts) - 1)) if parts[i] in MODEL_KEYS
    ]
    return out


def _find_owners(
    weights: Mapping[Path, Shape | None],
    params: Mapping[Path, Mapping[str, Collection[Shape]]],
    owners: Mapping[Path, Path] | None = None,
) -> dict[Path, Path | None]:
    """Find the model that each optimizer trains: the mapping that contains all of the optimizer's parameters.

    Among several, it is the only one whose weights have the shapes of the states; otherwise the
    only one that has a name like the optimizer's (`netG` and `optimizerG`), or a key like `model`,
    or the same parent as the optimizer. If none of this identifies it, or two optimizers would have
    the same parameter, it is the optimizer itself; None if there is no such mapping.

    Args:
        weights: the shape of each weight, by path; None if it is not known.
    """
    if not params:
        return {}
    mappings: dict[Path, dict[str, Shape | None]] = {}
    for path, shape in weights.items():
        for i in range(len(path)):
            mappings.setdefault(path[:i], {})[dotted(path[i:])] = shape
    out: dict[Path, Path | None] = {}
    owners = owners or {}
    for root, names in params.items():
        owner = owners.get(root)
        if owner is not None and not mappings.get(owner, {}).keys() >= names.keys():
            raise UsageError(
                f"{dotted(owner)} does not hold all parameters that the optimizer {dotted(root)} "
                "names"
            )
        out[root] = _owner(root, names, mappings) if owner is None else owner
    for root, owner in list(out.items()):
        twins = [
            r
            for r in out
            if r != root and out[r] == owner and not params[r].keys().isdisjoint(params[root])
        ]
        if owner is not None and twins and root not in owners:
            out |= {r: r for r in (root, *twins) if r not in owners}
    return out


def _owner(
    root: Path,
    names: Mapping[str, Collection[Shape]],
    mappings: Mapping[Path, Mapping[str, Shape | None]],
) -> Path | None:
    fitting = [p for p, shapes in mappings.items() if shapes.keys() >= names.keys()]
    alike = [p for p in fitting if all(mappings[p][n] in (None, *s) for n, s in names.items() if s)]
    fitting = alike or fitting
    for candidates in (
        fitting,
        [p for p in fitting if _words(p) and _words(p) == _words(root)],
        [p for p in fitting if p and p[-1] in MODEL_KEYS],
        [p for p in fitting if p[:-1] == root[:-1]],
    ):
        if len(candidates) == 1:
            return candidates[0]
    return root if fitting else None


_COMMON_WORDS = frozenset(["state", "dict", "optim", "optimizer", "optimizers", "opt"]).union(
    *([word, word + "s"] for word in ("model", "module", "net", "network"))
)


def _words(path: Path) -> frozenset[str]:
    """The words of a path that distinguish a model, or an optimizer, from others."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", dotted(path))
    return frozenset(w.lower() for w in words) - _COMMON_WORDS
