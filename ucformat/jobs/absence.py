"""Whether it can be believed that nothing is left at a place, or only its disk is not mounted.

An object store answers for itself: what it does not list is not there. A local folder that is absent or empty looks the
same whether its files were removed or its disk is not there, so the folder above it is asked: where that holds anything
else, the disk is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.errors import NotFound
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Store

__all__ = ["check_listed", "check_removed", "is_empty"]


def is_empty(store: Store) -> bool:
    """Whether a place lists nothing."""
    try:
        return next(iter(store.list()), None) is None
    except NotFound:  # a bucket that is gone
        return True


def check_listed(store: Store, catalog: Catalog) -> None:
    """Refuse to take a place that lists nothing for empty, if the catalog knows checkpoints there or it is absent.

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
