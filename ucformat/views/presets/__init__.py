"""Presets: the steps between the names and shapes of one family of models and another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError
from ucformat.views.presets import gpt2, llama, mixtral, stacks
from ucformat.views.presets.numbers import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PRESETS", "preset_steps"]

Steps = list[dict[str, Any]]

#: Name -> the options that it takes, and what makes the steps.
PRESETS: dict[str, tuple[frozenset[str], Callable[[Numbers], Steps]]] = {
    "megatron-to-llama": (llama.FROM, llama.from_megatron),
    "llama-to-megatron": (llama.TO, llama.to_megatron),
    "megatron-to-qwen2": (llama.FROM, llama.from_megatron),
    "qwen2-to-megatron": (llama.TO, llama.to_megatron),
    "megatron-to-qwen3": (llama.FROM, llama.from_megatron),
    "qwen3-to-megatron": (llama.TO, llama.to_megatron),
    "megatron-to-mixtral": (mixtral.FROM, mixtral.from_megatron),
    "mixtral-to-megatron": (mixtral.TO, mixtral.to_megatron),
    "megatron-to-gpt2": (gpt2.FROM, gpt2.from_megatron),
    "gpt2-to-megatron": (gpt2.TO, gpt2.to_megatron),
    "megatron-stack": (frozenset(), stacks.stack),
    "megatron-unstack": (frozenset(), stacks.unstack),
}


def preset_steps(
    name: str,
    options: Mapping[str, int | bool | None],
    objects: Mapping[str, Any],
    assets: Mapping[str, bytes],
    names: Sequence[str],
) -> Sequence[Mapping[str, Any]]:
    """The steps of a preset, as a layout file spells them.

    `objects`, `assets` and `names` are the checkpoint's: Megatron's `args` and Hugging Face's `config.json` tell what
    the options do not. LayoutError where there is no such preset or option, or it needs a number that nobody tells.
    """
    if name not in PRESETS:
        raise LayoutError(f"there is no preset {name!r}", hint=f"there are: {', '.join(PRESETS)}")
    known, make = PRESETS[name]
    if unknown := sorted(set(options) - known):
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise LayoutError(f"the preset {name} has no option {unknown[0]!r}", hint=takes)
    return make(Numbers(name, options, objects, assets, tuple(names)))
