"""What the page of a run's saves shows: how long ranks wrote and training stood still, as their manifests say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import instant
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import UcformatError
from ucformat.jobs.timings import save_timings
from ucformat.web.library import NoRepository

if TYPE_CHECKING:
    from ucformat.web.library import Access, Library

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
        timings = None if universal is None else save_timings(universal.manifest)
        if timings is None:
            data["unrecorded"].append(about)
        else:
            data["saves"].append(about | {"created": instant(entry.created)} | timings)
    return data
