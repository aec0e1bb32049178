"""What the listing of a place proves: that files are unchanged, or that they are gone.

Files are those that were read if a hash of their listing is the same. Trusted are sizes, inodes, times of modification
and of change of local files (the last cannot be set), and etags or versions of objects; of a universal checkpoint also
the manifest's content. Not trusted is a place that tells none of these, and a file that was changed so lately that a
further change could have the same time.

An object that is not listed is not there. A local folder that is absent or empty looks the same whether its files were
removed or its disk is not mounted: if the folder above it holds anything else, the disk is there.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat._version import __version__
from ucformat.errors import NotFound, UcformatError
from ucformat.format.commit import MANIFEST
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Info, Store

__all__ = ["check_listed", "check_removed", "is_empty", "listing_hashes"]

_FINE, _COARSE = 0.1, 2.0  # seconds within which a file may change twice at one time: of fine clocks, of full seconds


def listing_hashes(store: Store, folders: Sequence[str], infos: Iterable[Info], begun: float) -> Mapping[str, str]:
    """The hash of each folder that has none of the others inside or around it, and whose files can be trusted.

    Args:
        store: where they lie.
        folders: their keys.
        infos: all files below the root of the store.
        begun: when these began to be listed, in seconds since 1970.
    """
    below: dict[str, list[Info]] = {folder: [] for folder in _without_nested(folders)}
    for info in infos:
        for above in _above(info.key):
            if above in below:
                below[above].append(info)
                break
    found = {folder: _hash(store, folder, files, begun) for folder, files in below.items()}
    return {folder: said for folder, said in found.items() if said is not None}


def _without_nested(folders: Sequence[str]) -> set[str]:
    """The folders that have none of the others inside, and are inside of none."""
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
        out.update(repr((info.key, info.size, info.version, info.etag, info.changed)).encode("utf-8", "surrogatepass"))
        if info.key == (f"{folder}/{MANIFEST}" if folder else MANIFEST):
            try:
                out.update(store.read(info.key))
            except UcformatError:  # of which whoever opens it says more
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
    """Whether a place lists nothing.

    Args:
        store: the place.
    """
    try:
        return next(iter(store.list()), None) is None
    except NotFound:  # a bucket that is gone
        return True


def check_listed(store: Store, catalog: Catalog) -> None:
    """Refuse to treat a place without files as empty if the catalog knows checkpoints there or it does not exist.

    Args:
        store: the place.
        catalog: the catalog.

    Raises:
        NotFound: it may be a disk that is not mounted.
    """
    known = len(catalog.places(store.url))
    absent = isinstance(store, LocalStore) and not Path(store.url).is_dir()
    if known or absent:
        knows = f", and the catalog knows {known} checkpoint{'s' * (known != 1)} there" if known else ""
        raise NotFound(
            f"{store.url} {'does not exist' if absent else 'is empty'}{knows}: is its disk not mounted?",
            hint=f"mount it; or, if all is gone for good: ucp reindex {store.url} --forget",
        )


def check_removed(store: Store, *, begun: bool) -> None:
    """Refuse to take a place that holds nothing for one that was removed, unless the folder above it is there.

    Args:
        store: the place.
        begun: its removal was begun before, so that the folder above may be empty by now.

    Raises:
        NotFound: it may be on a disk that is not mounted.
    """
    if not isinstance(store, LocalStore):
        return
    above = Path(store.url).parent
    if not above.is_dir() or not (begun or any(p.name != Path(store.url).name for p in above.iterdir())):
        raise NotFound(
            f"there is nothing at {store.url}, nor beside it: is its disk not mounted?",
            hint=f"mount it; or, if it is gone for good: ucp reindex {store.url} --forget",
        )
