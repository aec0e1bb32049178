"""Opening a checkpoint in another process as it was opened in this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import Conflict, UsageError
from ucformat.references import open_reference
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import split_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

_LAYOUT = "$layout"  # of an option that is a layout: its document


def spec_of(ck: Checkpoint) -> dict[str, Any]:
    """What another process needs to open a checkpoint in the same way, as JSON values."""
    if ck.opened is None and ck.foreign is not None:
        raise UsageError(
            f"{ck.url} was opened in a way that other processes cannot repeat",
            hint="give its path, url or reference",
        )
    place, options, _, views = ck.recipe
    if split_url(place)[0] == "memory":
        raise UsageError(
            f"{place} is in the memory of this process alone",
            hint="use a place that all machines reach",
        )
    return {"place": place, "options": plain_options(options), "views": views}


def content_of(ck: Checkpoint, infos: Sequence[TensorInfo]) -> dict[str, Any]:
    """What of a checkpoint identifies a plan: its files as they are now, tensors, and the view."""
    files = map_io(ck.store.info, ck.metadata.files)
    return {
        "files": [(f.key, f.size, f.version) for f in files],
        "tensors": [(i.name, i.state, i.dtype, i.shape) for i in infos],
        "view": ck.recipe[3],
    }


def reopen(spec: Mapping[str, Any]) -> Checkpoint:
    """Open a checkpoint as another process has opened it."""
    checkpoint = open_reference(spec["place"], options=options_of(spec["options"]) or None)
    for steps in spec["views"]:
        checkpoint = checkpoint.view(steps)
    return checkpoint


def other_found(checkpoint: Checkpoint) -> Conflict:
    """The error for a checkpoint that is not as it was where the job was started."""
    return Conflict(
        f"a worker finds another checkpoint, or other files, at {checkpoint.url} than where the "
        "job was started",
        hint="it must be the same place on all machines, and must not change meanwhile",
    )


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a source as JSON values."""
    if not options:
        return {}
    from ucformat.geometry.layout import Layout  # few checkpoints have options

    return {k: {_LAYOUT: v.dump()} if isinstance(v, Layout) else v for k, v in options.items()}


def options_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a source."""
    if not plain:
        return {}
    from ucformat.geometry.layout import Layout

    return {
        k: Layout.parse(v[_LAYOUT]) if isinstance(v, dict) and _LAYOUT in v else v
        for k, v in plain.items()
    }
