"""The names of a program's tensors: those of the module that is wrapped, with the numbers of the whole model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class GlobalNames:
    """The names in the whole model of what a rank names locally.

    Args:
        shifts: by pattern, such as `layers.*`, what is added to the number in the place of the star.
    """

    def __init__(self, shifts: Mapping[str, int]) -> None:
        self._shifts: list[tuple[re.Pattern[str], int]] = []
        for pattern, shift in shifts.items():
            head, star, tail = pattern.partition("*")
            if not star or "*" in tail or isinstance(shift, bool) or not isinstance(shift, int):
                raise UsageError(
                    f"names={{{pattern!r}: {shift!r}}} is not a pattern with one star and a number",
                    hint='{"layers.*": 16} adds 16 to the number of each layer',
                )
            text = rf"({re.escape(head)})(\d+)({re.escape(tail)}(?:\..*)?)"
            self._shifts.append((re.compile(text, re.ASCII), shift))

    def of(self, name: str) -> str:
        """Return the name in the whole model."""
        for pattern, shift in self._shifts:
            if match := pattern.fullmatch(name):
                number = int(match[2]) + shift
                if number < 0:
                    raise UsageError(f"names= gives {name} the number {number}")
                return f"{match[1]}{number}{match[3]}"
        return name


def with_extra_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the submodules that define `get_extra_state`, with the key of this state in a state dict."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{path}._extra_state".lstrip("."), part


#: Under these names wrappers keep the module that they wrap.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(module: torch.nn.Module, key: str) -> str:
    """A key of a module's state dict, or the name of a parameter, without the prefixes of wrappers."""
    parts: list[str] = []
    inner: Any = module
    for part in key.split("."):
        wrapped = part == "module" and isinstance(inner, DistributedDataParallel)
        if not wrapped and part not in _WRAPPED:
            parts.append(part)
        inner = getattr(inner, part, None)
    return ".".join(parts)
