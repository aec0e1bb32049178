"""Conclusions from the listing of a place: that files are unchanged, or that they are gone.

Files are unchanged if a hash of their listing is. It covers sizes, inodes, times of modification
and of change of local files (the last cannot be set), and etags or versions of objects; of a
universal checkpoint also the manifest's content. There is no hash for a place that has none of
these, or for a file that was changed so recently that a further change could have the same time.

An object that is not listed does not exist. A local folder that is absent or empty looks the same
whether its files were removed or its disk is not mounted: if the folder above it holds anything
else, the disk is there.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat._version import __version__
from ucformat.errors import NotFound, UcformatError, first_names
from ucformat.format.attempts import outside_attempts
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.retention import RetentionRow
    from ucformat.storage.base import Info, Store

# seconds in which two changes may get the same time: fine clocks, whole-second clocks
_FINE, _COARSE = (0.1, 2.0)


@dataclass(frozen=True, slots=True)
class ListedTree:
    """A place, the folders in it that look like checkpoints, and the hashes of their listings."""

    store: Store
    folders: list[str]
    listings: Mapping[str, str]

    def url(self, folder: str) -> str:
        """The url of one of the folders."""
        return f"{self.store.url}/{folder}" if folder else self.store.url


def search(infos: Iterable[Info]) -> list[str]:
    """The folders that look like checkpoints, in order, an outer one before those inside of it."""
    from ucformat.sources.opening import marked_folders

    infos = list(infos)
    named = ((folder, name) for folder, _, name in (info.key.rpartition("/") for info in infos))
    folders = marked_folders(infos) | {
        folder for folder, name in named if name in (MANIFEST, TOMBSTONE)
    }
    folders = outside_attempts(folders, (info.key for info in infos))
    return sorted(folders, key=lambda f: f.split("/") if f else [])


def listing_hashes(
    store: Store, folders: Sequence[str], infos: Iterable[Info], begun: float
) -> Mapping[str, str]:
    """The hash of each folder that is not nested with others, and whose listing can be trusted.

    Args:
        begun: the time when the listing began, in seconds since 1970.
    """
    below: dict[str, list[Info]] = {folder: [] for folder in _without_nested(folders)}
    for info in infos:
        for above in _above(info.key):
            if above in below:
                below[above].append(info)
                break
    hashes = {folder: _hash(store, folder, files, begun) for folder, files in below.items()}
    return {folder: value for folder, value in hashes.items() if value is not None}


def _without_nested(folders: Sequence[str]) -> set[str]:
    """The folders that neither contain nor are inside of others."""
    chosen = set(folders)
    nested = {f: [a for a in _above(f) if a in chosen] for f in folders}
    return {f for f in chosen if not nested[f]} - {a for above in nested.values() for a in above}


def _above(key: str) -> list[str]:
    """The folders above a key, the root among them."""
    parts = key.split("/") if key else []
    return ["/".join(parts[:n]) for n in range(len(parts))]


def _hash(store: Store, folder: str, files: Sequence[Info], begun: float) -> str | None:
    out = hashlib.blake2b(f"{__version__}\n".encode(), digest_size=16)
    for info in files:
        if not _is_settled(info, begun):
            return None
        out.update(
            repr((info.key, info.size, info.version, info.etag, info.changed)).encode(
                "utf-8", "surrogatepass"
            )
        )
        if info.key == (f"{folder}/{MANIFEST}" if folder else MANIFEST):
            try:
                out.update(store.read(info.key))
            except UcformatError:  # opening the checkpoint reports it in full
                return None
    return out.hexdigest()


def _is_settled(info: Info, begun: float) -> bool:
    if info.etag is not None:
        return True
    if info.changed is None and info.modified is None:
        return False
    latest = max(info.modified or 0.0, (info.changed or 0) / 1e9)
    return latest < begun - (_COARSE if latest == int(latest) else _FINE)


def is_empty(store: Store) -> bool:
    """Whether a place lists nothing."""
    try:
        return next(iter(store.list()), None) is None
    except NotFound:  # a bucket that was deleted
        return True


def check_listed(store: Store, catalog: Catalog) -> None:
    """Refuse to treat a place without files as empty if the catalog knows checkpoints there or it does not exist.

    Raises:
        NotFound: its disk may not be mounted.
    """
    count = len(catalog.places(store.url))
    absent = isinstance(store, LocalStore) and not Path(store.url).is_dir()
    if count or absent:
        knows = (
            f", and the catalog knows {count} checkpoint{'s' * (count != 1)} there" if count else ""
        )
        raise NotFound(
            f"{store.url} {'does not exist' if absent else 'is empty'}{knows}: is its disk not "
            "mounted?",
            hint=(
                f"mount it; or, if the checkpoints no longer exist: ucp reindex {store.url} "
                "--forget"
            ),
        )


def check_removed(store: Store, *, begun: bool) -> None:
    """Refuse to treat an empty place as removed, unless the folder above it exists.

    Args:
        begun: its removal began before, so that the folder above may be empty by now.

    Raises:
        NotFound: its disk may not be mounted.
    """
    if not isinstance(store, LocalStore):
        return
    above = Path(store.url).parent
    gone = next(
        (p for p in (*reversed(Path(store.url).parents), Path(store.url)) if not p.exists()),
        Path(store.url),
    )
    if not above.is_dir() or not (
        begun or any(p.name != Path(store.url).name for p in above.iterdir())
    ):
        raise NotFound(
            f"there is nothing at {store.url}, nor beside it: is its disk not mounted?",
            hint=f"mount it; or, if it no longer exists: ucp reindex {gone} --forget",
        )


def is_gone(url: str) -> bool:
    """Whether there is nothing at a local place, but something beside it, so that its disk is there.

    Args:
        url: the place; those on other storage are not looked at.
    """
    place = Path(url)
    try:
        return "://" not in url and not place.exists() and any(place.parent.iterdir())
    except OSError:  # nor is there a folder above, or it cannot be read
        return False


def warning_of_gone(kept: Iterable[RetentionRow]) -> str | None:
    """Tell which checkpoints a program has removed by itself: rules count them, and delete others instead."""
    gone = [row for row in kept if row.places and all(map(is_gone, row.places))]
    if not gone:
        return None
    named = first_names((row.name for row in gone), 3)
    place = os.path.commonpath([os.path.dirname(url) for row in gone for url in row.places])  # noqa: PTH120 - of text
    subject = "checkpoint no longer exists" if len(gone) == 1 else "checkpoints no longer exist"
    return (
        f"of those to keep, {len(gone):,} {subject} in storage, "
        f"and may displace others: {named}; ucp reindex {place} --forget, and plan again"
    )
