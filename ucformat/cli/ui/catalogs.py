"""The catalog of a command."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog


def url_of_catalog() -> str:
    """The url of the catalog from --catalog, else from the settings."""
    from ucformat.errors import PermissionDenied
    from ucformat.settings import load_settings

    url = load_settings().catalog_url()
    if url is None:
        raise PermissionDenied(
            "the catalog is switched off",
            hint="pass --catalog URL, or set the variable UCP_CATALOG",
        )
    return url


@contextmanager
def opened_catalog() -> Iterator[Catalog]:
    """The catalog from --catalog, else from the settings; closed at the end of the block."""
    import ucformat

    with ucformat.Catalog(url_of_catalog()) as catalog:
        yield catalog
