"""What the page of jobs shows: what is being written beside the checkpoints of the catalog, or was left unfinished."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import data_of
from ucformat.errors import UnsupportedError
from ucformat.jobs.begun import FILES, begun_below

if TYPE_CHECKING:
    from ucformat.web.library import Access, Library

_CHECKPOINTS = 500  # the newest, beside which it is looked
_FOLDERS = 20
_INSIDE = 1000  # folders in each
_JOBS = 100
_UNREAD = 100  # places that are listed


def jobs_data(library: Library, access: Access) -> dict[str, Any]:
    """The data of the page of jobs.

    Raises:
        UnsupportedError: the client may not see all, so it may not know where files are.
    """
    if library.is_limited(access):
        raise UnsupportedError("what is being written is shown to those who may see all")
    urls = [url for entry in library.entries(access, limit=_CHECKPOINTS) for url in entry.urls]
    parents = list(dict.fromkeys(url.rstrip("/").rpartition("/")[0] for url in urls))
    local = [folder for folder in parents if folder and "://" not in folder]
    jobs: list[dict[str, Any]] = []
    partly: list[str] = []
    unread: dict[str, str] = {}
    left = FILES
    for folder in local[:_FOLDERS]:
        looked = begun_below(folder, _INSIDE, left)
        left -= looked.files
        jobs += [data_of(each) for each in looked.begun]
        partly += [folder] if looked.has_more else []
        unread |= looked.unread
    jobs.sort(key=lambda job: job["written"] or job["started"], reverse=True)
    return {
        "jobs": jobs[:_JOBS],
        "others": max(0, len(jobs) - _JOBS),
        "folders": local[:_FOLDERS],
        "partly": partly,
        "unread": [
            {"place": place, "reason": reason} for place, reason in islice(unread.items(), _UNREAD)
        ],
        "other_unread": max(0, len(unread) - _UNREAD),
        "passed_over": [*(f for f in parents if f and "://" in f), *local[_FOLDERS:]][:_FOLDERS],
    }
