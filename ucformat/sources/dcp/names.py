"""From the paths of a training state to the names and states of tensors: one rule for saving and for loading.

`{"model": …, "optim": {"state": {"a.weight": {"exp_avg": t}}, "param_groups": […]}}` and its flattened spellings
(`optim.state.a.weight.exp_avg`) all mean the tensor `a.weight` in the states `weight` and `exp_avg`, as every other
engine's checkpoint has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.errors import UsageError, option_text
from ucformat.geometry.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["GROUPS", "Path", "dotted", "find_models", "key_of_dotted", "name_paths", "optimizer_roots", "split_state"]

Path = tuple[str | int, ...]

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


def name_paths(tensors: Iterable[Path], optimizers: Collection[Path]) -> dict[Path, Key]:
    """The name and state of each tensor of a training state, by its path.

    Below an optimizer, `state`, a parameter's name and a state's name (one part each, or joined by dots) are that
    state of that parameter. All else is in the state `weight`, and named by the last part of its path where it lies in
    the model, by the whole path elsewhere. The model is the one mapping that holds the parameters the optimizer names;
    else the only mapping of tensors; else the one called `model` or `module`.
    """
    states: dict[Path, tuple[str, str]] = {}
    rest: list[Path] = []
    paths = list(tensors)
    leaves = {str(p[-1]) for p in paths}
    for path in paths:
        found = _optimizer_state(path, optimizers, leaves)
        if found is None:
            rest.append(path)
        else:
            states[path] = found
    model = _model({p[:-1] for p in rest}, rest, {name for name, _ in states.values()})
    out = {p: Key(str(p[-1]) if p[:-1] == model else dotted(p), "weight") for p in rest}
    return {p: out[p] if p in out else Key(*states[p]) for p in paths}


def _optimizer_state(path: Path, optimizers: Collection[Path], leaves: Collection[str]) -> tuple[str, str] | None:
    root = next((r for r in optimizers if path[: len(r)] == r), None)
    if root is None:
        return None
    below = path[len(root) :]
    if len(below) >= 3 and below[0] == _STATE:
        name = below[1]
        return None if isinstance(name, int) or name.isdigit() else (name, dotted(below[2:]))  # numbers name nothing
    if len(below) == 1 and str(below[0]).startswith(_STATE + "."):
        return split_state(str(below[0])[len(_STATE) + 1 :], leaves)
    return None


def split_state(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """A parameter's name and a state's, joined by a dot: after a name that is known, else at the last dot."""
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if text[:at] in names and not text[:at].isdigit():
            return text[:at], text[at + 1 :]
    name, dot, state = text.rpartition(".")
    return (name, state) if dot and not name.isdigit() else None


def _model(roots: Collection[Path], paths: Iterable[Path], named: Collection[str]) -> Path | None:
    """Where the model lies, or None where nothing tells."""
    if named:
        held: dict[Path, set[str]] = {}
        for path in paths:
            held.setdefault(path[:-1], set()).add(str(path[-1]))
        fitting = [root for root, names in held.items() if names >= set(named)]
        if len(fitting) == 1:
            return fitting[0]
    if len(roots) == 1:
        return next(iter(roots))
    called = [r for r in roots if r and r[-1] in _MODELS]
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


def find_models(
    weights: Iterable[Path], named: Mapping[Path, Collection[str]], owners: Mapping[str, str] | None = None
) -> dict[Path, Path | None]:
    """Where the model of each optimizer lies: the mapping below which all parameters are that the optimizer names.

    None where there is no such mapping. Of several it is the only one called `model` or the like, else the only one
    beside the optimizer; UsageError where that does not tell. `owners` says it, by dotted paths.
    """
    held: dict[Path, set[str]] = {}
    for path in weights:
        for i in range(len(path)):
            held.setdefault(path[:i], set()).add(dotted(path[i:]))
    out: dict[Path, Path | None] = {}
    for root, names in named.items():
        told = (owners or {}).get(dotted(root))
        fitting = [p for p, have in held.items() if have >= set(names) and told in (None, dotted(p))]
        if told is not None and not fitting:
            raise UsageError(f"{told} does not hold all parameters that the optimizer {dotted(root)} names")
        called, beside = [p for p in fitting if p and p[-1] in _MODELS], [p for p in fitting if p[:-1] == root[:-1]]
        if len(fitting) > 1:
            fitting = next((some for some in (called, beside) if len(some) == 1), fitting)
        if len(fitting) > 1:
            which = " and ".join(dotted(p) for p in fitting[:4])
            raise UsageError(
                f"the parameters that the optimizer {dotted(root)} names are in {which}",
                hint="say whose they are: " + option_text("owners", f"{{{dotted(root)!r}: {dotted(fitting[0])!r}, …}}"),
            )
        out[root] = fitting[0] if fitting else None
    return out
