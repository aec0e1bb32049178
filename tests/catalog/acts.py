"""What tests do with a catalog again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tests.catalog.manifests import manifest
from ucformat.catalog.deletion import begin_purge, end_purge
from ucformat.catalog.refs import parse_ref, resolve
from ucformat.catalog.stamp import make_stamp

if TYPE_CHECKING:
    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.models import Base


def put(catalog: Catalog, number: int, url: str | None = None, **more: Any) -> Entry:
    """Record checkpoint `number` of run7, at the step of that number."""
    return catalog.record(
        manifest(number, **({"step": number} | more)), url or f"/data/run7/{number}"
    )


def rows(catalog: Catalog, table: type[Base]) -> int:
    with catalog.database.reading() as c:
        return c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def actions(catalog: Catalog, ref: str | None = None) -> list[str]:
    return [e.action for e in reversed(catalog.events(ref))]


def purge(catalog: Catalog, ref: str) -> None:
    """As `gc` does, without storage."""
    with catalog.database.writing() as c:
        serial = resolve(c, parse_ref(ref))
        assert begin_purge(c, serial, make_stamp()) is not None
        end_purge(c, serial, make_stamp())
