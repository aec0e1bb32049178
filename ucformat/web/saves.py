"""What the page of a run's saves shows: how long ranks wrote and training stood still, as their manifests say."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import instant
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import UcformatError
from ucformat.web.library import NoRepository

if TYPE_CHECKING:
    from ucformat.schema.manifest import Manifest
    from ucformat.web.library import Access, Library

_WRITERS = 64  # of a save that are listed: our writers record no more
_SAVES = 24  # the newest of a run, whose manifests are read


def saves_data(library: Library, access: Access, run: str) -> dict[str, Any]:
    """The data of the page of a run's saves."""
    own = f"run = {quoted(run)} and kind = 'ucformat'"
    entries = library.entries(access, own, limit=_SAVES + 1)
    newest = entries or library.entries(access, f"run = {quoted(run)}", limit=1)
    if not newest:
        raise NoRepository(f"there is no run {run!r}")
    data: dict[str, Any] = {
        "name": run,
        "newest": newest[0].id,
        "more": len(entries) > _SAVES,
        "saves": [],
        "unrecorded": [],
        "failed": [],
    }
    for entry in reversed(entries[:_SAVES]):
        about = {"id": entry.id, "name": entry.name, "step": entry.step}
        try:
            universal = library.reference(entry.id, access).checkpoint.universal
        except UcformatError as error:
            reason = library.shown_error(error, access)["message"]
            data["failed"].append(about | {"reason": reason})
            continue
        if universal is None or not universal.manifest.writers:
            data["unrecorded"].append(about)
        else:
            created = {"created": instant(entry.created)}
            data["saves"].append(about | created | _saved(universal.manifest))
    return data


def _saved(manifest: Manifest) -> dict[str, Any]:
    """What a save recorded of its ranks; of more than 64, those that wrote longest are listed."""
    writers = manifest.writers
    longest = sorted(nlargest(_WRITERS, writers, key=lambda w: w.seconds), key=lambda w: w.rank)
    world = manifest.layout.get("world")
    seconds = max(writer.seconds for writer in writers)
    nbytes = sum(writer.nbytes for writer in writers)
    return {
        "ranks": world if isinstance(world, int) else None,
        "bytes": nbytes,
        "seconds": seconds,
        "stall": max(writer.stall for writer in writers),
        "bytes_per_second": nbytes / seconds if seconds > 0 else None,
        "writers": [
            {
                "rank": writer.rank,
                "bytes": writer.nbytes,
                "seconds": writer.seconds,
                "stall": writer.stall,
            }
            for writer in longest
        ],
        "other_writers": len(writers) - len(longest),
    }
