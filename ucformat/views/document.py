"""Reads the steps of a view: from files, from lists of mappings, and from presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError
from ucformat.geometry.layout import Layout, lower, lower_step, read_document
from ucformat.registry import Registry
from ucformat.schema.view import Preset, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.schema.view import Labelled


@dataclass(frozen=True)
class PresetInput:
    """What a preset is called with: its options, and the checkpoint from which other numbers are taken.

    Attributes:
        objects: the checkpoint's non-tensor values, by name.
        names: the names of the checkpoint's tensors.
    """

    preset: str
    options: Mapping[str, int | bool | None]
    objects: Mapping[str, Any]
    assets: Mapping[str, bytes]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ViewPreset:
    """Steps that depend on the configuration of a model.

    Attributes:
        steps: returns the steps, in the form of a layout file.
        options: the names of the options that replace numbers of the configuration.
    """

    steps: Callable[[PresetInput], list[dict[str, Any]]]
    options: frozenset[str] = frozenset()


PRESETS: Registry[ViewPreset] = Registry("views", "preset")


def preset_steps(
    name: str,
    options: Mapping[str, int | bool | None],
    objects: Mapping[str, Any],
    assets: Mapping[str, bytes],
    names: Sequence[str],
) -> Sequence[Mapping[str, Any]]:
    """The steps of a preset, in the form of a layout file.

    Numbers that are not given as options come from the checkpoint.
    """
    if name not in PRESETS:
        raise LayoutError(
            f"there is no preset {name!r}", hint=f"there are: {', '.join(PRESETS.names())}"
        )
    preset = PRESETS[name]
    if unknown := sorted(set(options) - preset.options):
        takes = f"it takes {', '.join(sorted(preset.options)) or 'none'}"
        raise LayoutError(f"the preset {name} has no option {unknown[0]!r}", hint=takes)
    return preset.steps(PresetInput(name, options, objects, assets, tuple(names)))


#: A checkpoint's objects, assets and names.
ModelFacts = tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[str]]

#: A layout (for its view), the name of a preset, the path of a layout file, or steps in the form of
#: such a file.
Steps = Layout | str | PathLike[str] | Sequence[Mapping[str, Any] | Step]


def read_steps(steps: Steps) -> tuple[Labelled, ...]:
    """Read the steps of a view, each with its label for error messages."""
    if isinstance(steps, Layout):
        return steps.view
    if isinstance(steps, str) and steps in PRESETS:
        return ((steps, lower_step({"preset": steps}, steps)),)
    if isinstance(steps, str | PathLike):
        path = Path(steps)
        if isinstance(steps, str) and not path.suffix and not path.exists():
            raise LayoutError(
                f"{steps!r} is neither a preset nor a file",
                hint=f"presets: {', '.join(PRESETS.names())}",
            )
        listed = lower(read_document(path), path)["view"]
        if not listed:
            raise LayoutError(
                f"{path} has no view", hint="its section `view` lists the steps; docs/view.md"
            )
        return tuple(listed)
    return tuple((f"view[{i}]", lower_step(step, f"view[{i}]")) for i, step in enumerate(steps))


def load(path: str | PathLike[str]) -> Layout | None:
    """Load the layout of a file; None if the file has only a view."""
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
            listed = preset_steps(step.preset, step.options, *facts())
            out += [
                (f"{label} ({step.preset}) [{i}]", lower_step(s, label))
                for i, s in enumerate(listed)
            ]
        else:
            out.append((label, step))
    return tuple(out)
