"""The base of a save: the checkpoint that it names, or the newest one in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.catalog.lines import newest_first
from ucformat.errors import IntegrityError, NotACheckpoint, UpgradeNeeded
from ucformat.format.bases import folder_around, url_of_base
from ucformat.jobs.increments import Base
from ucformat.references import open_reference
from ucformat.schema import MANIFEST
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store, split_url
from ucformat.torch.saving.options import LATEST

if TYPE_CHECKING:
    from ucformat.torch.manager.steps import RunStep


def open_base(base: str | None, home: str) -> Base | None:
    """Open the base of a checkpoint that is saved at `home`; None if there is none to be based on.

    The newest one in the folder is none if no further one can be based on it: a training goes on.
    """
    place = newest_beside(home) if base == LATEST else base
    opened = None if place is None else Base(open_reference(place), home)
    return None if opened is not None and base == LATEST and opened.is_deepest else opened


def newest_beside(home: str) -> str | None:
    """The place of the newest checkpoint in the same folder, other than at the place itself."""
    from ucformat.torch.manager.steps import read_step  # few saves need it

    folder = folder_around(home)
    if folder is None:
        return None
    own = url_of_base(home, home)
    places = [place for place in _below(folder) if url_of_base(home, place) != own]

    def read(place: str) -> RunStep | None:
        try:
            return read_step(place)
        except (IntegrityError, NotACheckpoint, UpgradeNeeded):
            return None

    steps = newest_first(
        step for step in map_io(read, places) if step is not None and not step.is_remnant
    )
    return steps[0].url if steps else None


def _below(folder: str) -> list[str]:
    """The folders directly in a folder that have a manifest."""
    scheme, path = split_url(folder)
    if scheme in ("", "file"):  # without looking into any of them
        return sorted(str(manifest.parent) for manifest in Path(path).glob(f"*/{MANIFEST}"))
    keys = (info.key.split("/") for info in open_store(folder).list())
    return [f"{folder}/{parts[0]}" for parts in keys if parts[1:] == [MANIFEST]]
