"""What writers have begun and not committed: saves, conversions and copies, as they recorded it where they write."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from ucformat.errors import UcformatError
from ucformat.format.attempts import attempt_of
from ucformat.format.structure import find_manifest
from ucformat.jobs.gc import inspect_attempt
from ucformat.jobs.removal import read_tombstone
from ucformat.storage.url import open_store

_LATER = datetime.max.replace(tzinfo=UTC)
_ATTEMPTS = 100  # at a place, whose files are listed
_RECORDS = 10_000  # of attempts at a place, that are listed
FILES = 20_000  # of attempts, whose sizes and times are looked at


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


@dataclass(slots=True)
class Looked:
    """What a look at a folder has told.

    Attributes:
        has_more: whether it has more folders than were looked at.
        unread: why some places could not be looked at, or not whole, by the place.
        files: how many files of attempts were looked at.
    """

    begun: list[Begun]
    has_more: bool
    unread: dict[str, str]
    files: int = 0


def begun_below(folder: str, most: int, files: int = FILES) -> Looked:
    """The attempts at a local folder and at those directly in it.

    Args:
        most: how many of the folders in it are looked at.
        files: how many files of all attempts are looked at (default: 20,000).
    """
    places = [folder]
    looked = Looked([], has_more=False, unread={})
    try:
        with os.scandir(folder) as entries:
            folders = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            places += islice(folders, most)
            looked.has_more = next(folders, None) is not None
    except OSError as error:
        looked.unread[folder] = _why(error)
    for place in places:
        try:
            if _has_attempts(place):
                _add_begun(place, looked, files)
        except (OSError, UcformatError) as error:  # also what is removed at this instant
            looked.unread.setdefault(place, _why(error))
    return looked


def _why(error: OSError | UcformatError) -> str:
    return error.message if isinstance(error, UcformatError) else error.strerror or str(error)


def _has_attempts(place: str) -> bool:
    try:
        return stat.S_ISDIR((Path(place) / "attempts").stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _add_begun(place: str, looked: Looked, files: int) -> None:
    """Add the attempts at a place, of which so many files in all are looked at."""
    store = open_store(place)
    records = islice(store.list("attempts"), _RECORDS)
    attempts = [a for info in records if (a := attempt_of(info.key)) is not None]
    if not attempts:
        return
    manifest = find_manifest(store)
    current = manifest or read_tombstone(store)
    if len(attempts) > _ATTEMPTS:
        looked.unread[place] = (
            f"of its {len(attempts):,} attempts {_ATTEMPTS} were looked at; "
            "`ucp gc` removes those that were interrupted"
        )
    for attempt in attempts[:_ATTEMPTS]:
        if current is not None and attempt == current.attempt:
            continue
        try:
            seen = inspect_attempt(store, attempt, _LATER, files - looked.files)
        except UcformatError as error:  # the others are told nevertheless
            looked.unread[place] = _why(error)
            continue
        if seen is None or seen.doc.removed is not None:
            continue
        looked.files += seen.files
        if seen.has_more:
            looked.unread[place] = (
                f"of the files of its attempt {attempt} only {seen.files:,} were looked at, so there "
                "are more bytes, and perhaps later ones"
            )
        looked.begun.append(
            Begun(
                store.url,
                attempt,
                seen.doc.owner,
                seen.doc.started,
                None if seen.written is None else datetime.fromtimestamp(seen.written, UTC),
                seen.nbytes,
                manifest is not None,
                _is_running(seen.doc.owner),
            )
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
