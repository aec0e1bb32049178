"""Edges of the lineage, as they are recorded from the manifest of a child, from a document or by a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from ucformat.catalog.models import Checkpoint, Edge, Location
from ucformat.catalog.refs import same_place
from ucformat.catalog.rows import insert_if_absent, lock_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sqlalchemy import Connection

    from ucformat.schema.manifest import Manifest


def parent_names(manifest: Manifest) -> Iterator[str]:
    """The ids of the parents that a manifest names, or their places if it has no id."""
    return (p.id or same_place(p.url) for p in manifest.lineage)


def insert_edges(connection: Connection, serial: int, manifest: Manifest, url: str) -> None:
    """Record the edges of the lineage that a manifest has, and one for each place whose files it needs."""
    roots = () if manifest.sidecar is None else manifest.sidecar.roots
    outside = [r for r in map(same_place, roots) if not _below(r, url)]
    parents = [(p, same_place(p.url)) for p in manifest.lineage]
    for parent, place in parents:
        depends = any(_below(r, place) or _below(place, r) for r in outside)
        insert_edge(connection, serial, parent.kind, place, parent.id, depends=depends, how=parent.how)
    for root in outside:
        if not any(_below(root, place) or _below(place, root) for _, place in parents):
            insert_edge(connection, serial, "convert", root, None, depends=True)


def insert_edge(
    connection: Connection,
    serial: int,
    kind: str,
    parent_url: str,
    parent_id: str | None,
    *,
    depends: bool,
    how: Mapping[str, Any] | None = None,
) -> bool:
    """Record an edge of the lineage, linked to the parent if that is recorded.

    Args:
        parent_id: the parent's id (None: the parent is whatever checkpoint is at the place).
    """
    parent_url = same_place(parent_url)
    lock_names(connection, parent_id or parent_url)
    parent = None
    if parent_id is not None:
        parent = connection.scalar(sa.select(Checkpoint.serial).where(Checkpoint.id == parent_id))
    else:
        parent = connection.scalar(sa.select(Location.checkpoint).where(Location.url == parent_url))
    values = {"parent": parent, "parent_id": parent_id, "depends": depends, "how": dict(how) if how else None}
    keys = {"child": serial, "kind": kind, "parent_url": parent_url}
    return insert_if_absent(connection, Edge, keys, values, Edge.id) is not None


def _below(url: str, root: str) -> bool:
    """Whether a url is `root` or below it."""
    root = root.rstrip("/")
    return url.rstrip("/") == root or url.startswith(f"{root}/")
