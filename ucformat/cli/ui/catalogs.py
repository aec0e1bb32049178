"""The catalog of a command, and its checkpoints as JSON."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import HoldEntry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry


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


_NAMES = {"nbytes": "bytes", "files_nbytes": "files_bytes"}


def entry_data(entry: Entry) -> dict[str, Any]:
    """The JSON of a checkpoint in the catalog, the same in all commands: all that `Entry` has, and the name."""
    attributes: dict[str, Any] = data_of(entry)
    return {"id": entry.id, "name": entry.name} | attributes


def data_of(value: Any) -> Any:
    """The JSON of a value of the catalog: of a dataclass its fields; `nbytes` is named `bytes`."""
    match value:
        case datetime():
            return instant(value)
        case tuple():
            return [data_of(v) for v in value]
        case _ if is_dataclass(value):
            names = _NAMES | {"id": "number"} if isinstance(value, HoldEntry) else _NAMES
            return {
                names.get(f.name, f.name): data_of(getattr(value, f.name)) for f in fields(value)
            }
    return value


def instant(at: datetime | None) -> str | None:
    """The JSON of a time: ISO 8601, in UTC."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
