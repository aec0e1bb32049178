"""Between what people write for a view and its steps: files, presets, lists of mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError
from ucformat.geometry.document import lower, lower_step, read_document
from ucformat.geometry.layout import Layout
from ucformat.schema.view import Preset, Step
from ucformat.views.presets import PRESETS, preset_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.schema.view import Labelled

__all__ = ["Steps", "expand", "load", "read_steps"]

#: A checkpoint's objects, assets and names.
Told = tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[str]]

#: A layout (its view is meant), the name of a preset, a path of a layout file, or steps as such a file spells them.
Steps = Layout | str | PathLike[str] | Sequence[Mapping[str, Any] | Step]


def read_steps(steps: Steps) -> tuple[Labelled, ...]:
    """The steps, each with the label that errors give it; LayoutError names the line or the step of a fault."""
    if isinstance(steps, Layout):
        return steps.view
    if isinstance(steps, str) and steps in PRESETS:
        return ((steps, lower_step({"preset": steps}, steps)),)
    if isinstance(steps, str | PathLike):
        path = Path(steps)
        if isinstance(steps, str) and not path.suffix and not path.exists():
            raise LayoutError(f"{steps!r} is neither a preset nor a file", hint=f"presets: {', '.join(PRESETS)}")
        found = lower(read_document(path), path)["view"]
        if not found:
            raise LayoutError(f"{path} has no view", hint="its section `view` lists the steps; docs/view.md")
        return tuple(found)
    return tuple((f"view[{i}]", lower_step(step, f"view[{i}]")) for i, step in enumerate(steps))


def load(path: str | PathLike[str]) -> Layout | None:
    """The layout of a file; None where it is a view alone. LayoutError where it is neither."""
    model = read_document(Path(path))
    return Layout(**lower(model, Path(path))) if model.rules else None


def expand(steps: Sequence[Labelled], told: Callable[[], Told]) -> tuple[Labelled, ...]:
    """The steps, with those of presets in their place.

    What numbers a preset needs, the checkpoint may tell: `told` gives its objects, assets and names, if they are asked.
    """
    out: list[Labelled] = []
    for label, step in steps:
        if isinstance(step, Preset):
            found = preset_steps(step.preset, step.options, *told())
            out += [(f"{label} ({step.preset}) [{i}]", lower_step(s, label)) for i, s in enumerate(found)]
        else:
            out.append((label, step))
    return tuple(out)
