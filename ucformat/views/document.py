"""Reads the steps of a view: from files, from lists of mappings, and from presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron import views as gpt2
from ucformat.engines.megatron import views as llama
from ucformat.errors import LayoutError
from ucformat.geometry.layout import Layout, lower, lower_step, read_document
from ucformat.schema.view import Preset, Step
from ucformat.views.model_config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.schema.view import Labelled

_PresetSteps = list[dict[str, Any]]

#: Name -> the options of the preset, and the function that returns its steps.
PRESETS: dict[str, tuple[frozenset[str], Callable[[ModelConfig], _PresetSteps]]] = {
    "megatron-to-llama": (llama.LLAMA_FROM_OPTIONS, llama.megatron_to_llama),
    "llama-to-megatron": (llama.LLAMA_TO_OPTIONS, llama.llama_to_megatron),
    "megatron-to-qwen2": (llama.LLAMA_FROM_OPTIONS, llama.megatron_to_llama),
    "qwen2-to-megatron": (llama.LLAMA_TO_OPTIONS, llama.llama_to_megatron),
    "megatron-to-qwen3": (llama.LLAMA_FROM_OPTIONS, llama.megatron_to_llama),
    "qwen3-to-megatron": (llama.LLAMA_TO_OPTIONS, llama.llama_to_megatron),
    "megatron-to-mixtral": (llama.MIXTRAL_FROM_OPTIONS, llama.megatron_to_mixtral),
    "mixtral-to-megatron": (llama.MIXTRAL_TO_OPTIONS, llama.mixtral_to_megatron),
    "megatron-to-gpt2": (gpt2.GPT2_FROM_OPTIONS, gpt2.megatron_to_gpt2),
    "gpt2-to-megatron": (gpt2.GPT2_TO_OPTIONS, gpt2.gpt2_to_megatron),
    "megatron-stack": (frozenset(), llama.stack_layers),
    "megatron-unstack": (frozenset(), llama.unstack_layers),
}


def preset_steps(
    name: str,
    options: Mapping[str, int | bool | None],
    objects: Mapping[str, Any],
    assets: Mapping[str, bytes],
    names: Sequence[str],
) -> Sequence[Mapping[str, Any]]:
    """The steps of a preset, in the form of a layout file.

    Numbers that are not given as options come from Megatron's `args` or Hugging Face's
    `config.json`.
    """
    if name not in PRESETS:
        raise LayoutError(f"there is no preset {name!r}", hint=f"there are: {', '.join(PRESETS)}")
    known, make = PRESETS[name]
    if unknown := sorted(set(options) - known):
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise LayoutError(f"the preset {name} has no option {unknown[0]!r}", hint=takes)
    return make(ModelConfig(name, options, objects, assets, tuple(names)))


#: A checkpoint's objects, assets and names.
ModelFacts = tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[str]]

#: A layout (for its view), the name of a preset, the path of a layout file, or steps in the form of
#: such a file.
Steps = Layout | str | PathLike[str] | Sequence[Mapping[str, Any] | Step]


def read_steps(steps: Steps) -> tuple[Labelled, ...]:
    """Read the steps of a view.

    Returns:
        The steps, each with its label for error messages.
    """
    if isinstance(steps, Layout):
        return steps.view
    if isinstance(steps, str) and steps in PRESETS:
        return ((steps, lower_step({"preset": steps}, steps)),)
    if isinstance(steps, str | PathLike):
        path = Path(steps)
        if isinstance(steps, str) and not path.suffix and not path.exists():
            raise LayoutError(
                f"{steps!r} is neither a preset nor a file", hint=f"presets: {', '.join(PRESETS)}"
            )
        found = lower(read_document(path), path)["view"]
        if not found:
            raise LayoutError(
                f"{path} has no view", hint="its section `view` lists the steps; docs/view.md"
            )
        return tuple(found)
    return tuple((f"view[{i}]", lower_step(step, f"view[{i}]")) for i, step in enumerate(steps))


def load(path: str | PathLike[str]) -> Layout | None:
    """Load the layout of a file.

    Returns:
        The layout; None if the file has only a view.
    """
    model = read_document(Path(path))
    return Layout(**lower(model, Path(path))) if model.rules else None


def expand(steps: Sequence[Labelled], facts: Callable[[], ModelFacts]) -> tuple[Labelled, ...]:
    """Replace each preset by its steps.

    Args:
        facts: returns the checkpoint's objects, assets and names of tensors; called only if there
            is a preset.
    """
    out: list[Labelled] = []
    for label, step in steps:
        if isinstance(step, Preset):
            found = preset_steps(step.preset, step.options, *facts())
            out += [
                (f"{label} ({step.preset}) [{i}]", lower_step(s, label))
                for i, s in enumerate(found)
            ]
        else:
            out.append((label, step))
    return tuple(out)
