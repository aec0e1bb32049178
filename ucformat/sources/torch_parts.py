"""What a dictionary that torch saved consists of: state dicts of modules, of optimizers, and values.

People save `model.state_dict()` itself, or `{"model": …, "optimizer": …, "epoch": 3}` with keys of their choice, or
what Lightning writes (`state_dict`, `optimizer_states`). A state dict of a module is known by what it is: names and
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import Refused
from ucformat.sources.stand_ins import StoredTensor
from ucformat.sources.torch_optimizer import is_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Parts", "find_parts", "is_module"]

_DEPTH = 3  # levels below the top at which state dicts are looked for
_NODES = 5_000_000
_MAIN = ("model", "state_dict", "model_state_dict", "module", "net")
_TAKEN = object()


@dataclass(slots=True)
class Parts:
    """State dicts by the path at which they stand (`""`: the whole file), and all else in `rest`."""

    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: Any = None

    @property
    def main(self) -> str | None:
        """The path of the module whose names need no prefix: the only one, or the one under a usual name."""
        if len(self.modules) == 1:
            return next(iter(self.modules))
        usual = [path for path in self.modules if path in _MAIN]
        if len(usual) != 1:
            return None
        others = tuple(f"{path}." for path in self.modules if path != usual[0])
        return None if any(name.startswith(others) for name in self.modules[usual[0]]) else usual[0]

    def prefixes(self) -> Iterator[tuple[str, str]]:
        """The path of each module, the main one first, and what its names get in front."""
        main = self.main
        for path in sorted(self.modules, key=lambda p: p != main):
            yield path, "" if path == main else f"{path}."


def is_module(value: Any) -> bool:
    """Whether it is a module's state dict: mostly tensors by name, one of floating point with dims among them."""
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        return False
    tensors = [v for v in value.values() if isinstance(v, StoredTensor)]
    return (
        2 * len(tensors) >= len(value)
        and any(t.shape and t.dtype.startswith(("float", "bfloat", "complex")) for t in tensors)
        and not any(isinstance(v, dict | list | tuple) and not k.endswith("_extra_state") for k, v in value.items())
    )


def find_parts(value: Any) -> Parts:
    """The parts of what a file holds."""
    parts = Parts()
    walk = _Walk(parts)
    rest = walk.prune(value, "", 0)
    parts.rest = {} if rest is _TAKEN else rest
    if not parts.modules and isinstance(value, dict):  # tensors and values side by side, none of them a state dict
        own = {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, StoredTensor)}
        if is_module(own):
            parts.modules[""] = own
            parts.rest = {k: v for k, v in parts.rest.items() if k not in own}
    return parts


class _Walk:
    """Takes state dicts out of nested dictionaries and lists; a value may be shared, or hold itself."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.nodes = parts, 0

    def prune(self, value: Any, path: str, depth: int) -> Any:
        """The value without the state dicts in it, or `_TAKEN` where nothing of it is left."""
        if not isinstance(value, dict | list):
            return value
        self.nodes += len(value)
        if self.nodes > _NODES:
            raise Refused("the file holds too many values to be a checkpoint")
        if isinstance(value, dict) and is_optimizer(value):
            self.parts.optimizers[path or "optimizer"] = value
            return self._left({k: v for k, v in value.items() if k not in ("state", "param_groups")})
        if isinstance(value, dict) and is_module(value):
            self.parts.modules[path] = {k: v for k, v in value.items() if isinstance(v, StoredTensor)}
            return self._left({k: v for k, v in value.items() if not isinstance(v, StoredTensor)})
        if depth == _DEPTH:
            return value
        if isinstance(value, list):
            items: list[Any] = [
                self.prune(v, f"{path}.{i}" if path else str(i), depth + 1) for i, v in enumerate(value)
            ]
            taken = items and all(v is _TAKEN for v in items)
            return _TAKEN if taken else [None if v is _TAKEN else v for v in items]
        found = {k: self.prune(v, f"{path}.{k}" if path else str(k), depth + 1) for k, v in value.items()}
        left = {k: v for k, v in found.items() if v is not _TAKEN}
        return left if left or not found else _TAKEN

    @staticmethod
    def _left(rest: dict[Any, Any]) -> Any:
        return rest or _TAKEN
