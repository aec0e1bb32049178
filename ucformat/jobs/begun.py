"""What writers have begun and not committed: saves, conversions and copies, as they recorded it where they write."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError
from ucformat.format.attempts import attempt_of
from ucformat.format.structure import find_manifest
from ucformat.jobs.gc import inspect_attempt
from ucformat.jobs.removal import read_tombstone
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

_LATER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt that is not committed: somebody writes it, or was interrupted.

    Attributes:
        owner: the host and the process that began or continued it last.
        written: when a file of it was last written, by the clock of the place.
        nbytes: of the files that it has so far.
        replaces: whether a checkpoint is there, in whose place it may be committed.
        is_running: whether its process runs; None on another host.
    """

    url: str
    attempt: str
    owner: str
    started: datetime
    written: datetime | None
    nbytes: int
    replaces: bool
    is_running: bool | None


def begun_below(folder: str, most: int) -> tuple[list[Begun], bool]:
    """The attempts at a local folder and at those directly in it, and whether it has more folders than were looked at.

    Args:
        most: how many of the folders in it are looked at.
    """
    places = [folder]
    is_all = True
    with suppress(OSError), os.scandir(folder) as entries:
        folders = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        places += islice(folders, most)
        is_all = next(folders, None) is None
    begun: list[Begun] = []
    for place in places:
        if (Path(place) / "attempts").is_dir():
            with suppress(UcformatError):  # removed or damaged at this instant
                begun += _begun_at(place)
    return begun, not is_all


def _begun_at(place: str) -> Iterator[Begun]:
    store = open_store(place)
    attempts = [a for info in store.list("attempts") if (a := attempt_of(info.key)) is not None]
    if not attempts:
        return
    manifest = find_manifest(store)
    current = manifest or read_tombstone(store)
    for attempt in attempts:
        if current is not None and attempt == current.attempt:
            continue
        seen = inspect_attempt(store, attempt, _LATER)
        if seen is None or seen.doc.removed is not None:
            continue
        yield Begun(
            store.url,
            attempt,
            seen.doc.owner,
            seen.doc.started,
            None if seen.written is None else datetime.fromtimestamp(seen.written, UTC),
            seen.nbytes,
            manifest is not None,
            _is_running(seen.doc.owner),
        )


def _is_running(owner: str) -> bool | None:
    """Whether a process of this host runs, as far as its number tells; None on another host."""
    host, _, process = owner.rpartition(":")
    if host != socket.gethostname() or not process.isdecimal() or len(process) > 9:
        return None
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
