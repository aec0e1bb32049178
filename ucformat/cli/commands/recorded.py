"""The part of `ucp show` that comes from the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.cli.ui.catalogs import entry_data, file_of
from ucformat.cli.ui.text import field, moment, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry, HoldEntry, VerificationEntry
    from ucformat.cli.ui.output import Output
    from ucformat.geometry.tensor import TensorInfo


@dataclass(frozen=True)
class Recorded:
    """A checkpoint in the catalog, its parents as JSON, and its tensors if they are needed."""

    entry: Entry
    parents: tuple[dict[str, Any], ...]
    tensors: tuple[TensorInfo, ...] = ()

    def data(self) -> dict[str, Any]:
        """The JSON."""
        return entry_data(self.entry) | {"parents": list(self.parents)}

    def lines(self, here: str | None, width: int | None) -> Iterator[str]:
        """The lines for people."""
        for label, text in self._rows(here):
            yield from field(label, text, width)

    def _rows(self, here: str | None) -> Iterator[tuple[str, str]]:
        entry = self.entry
        if entry.run is not None:
            yield "run", entry.run
        if entry.state != "committed":
            yield "state", _state(entry)
        if entry.aliases:
            yield "alias", ", ".join(entry.aliases)
        if entry.tags:
            yield "tag", ", ".join(entry.tags)
        if entry.metrics:
            yield "metric", ", ".join(f"{name} {value:.6g}" for name, value in entry.metrics.items())
        yield from _annotations(entry)
        for parent in self.parents:
            yield "from", f"{parent['name']} ({parent['kind']})"
        if entry.verified is not None:
            yield "verified", _verified(entry.verified)
        for url in entry.urls:
            if url != here:
                yield "place" if here is None else "also in", url


def _annotations(entry: Entry) -> Iterator[tuple[str, str]]:
    """Holds and notes, and which annotations are from documents of other catalogs."""
    for hold in entry.holds:
        yield f"hold {hold.id}", _hold(hold)
    for note in entry.notes:
        yield "note", f"{note.text} ({note.who}, {moment(note.created)})"
    if entry.from_documents:
        yield "imported", f"from documents beside it: {', '.join(entry.from_documents)}"


def _state(entry: Entry) -> str:
    if entry.state != "deleted" or entry.deleted is None:
        return entry.state
    until = "" if entry.purge_after is None else f", can be restored until {moment(entry.purge_after)}"
    return f"deleted {moment(entry.deleted)}{until}"


def _hold(hold: HoldEntry) -> str:
    until = "" if hold.until is None else f", until {moment(hold.until)}"
    return f"{hold.reason}{until} ({hold.who}, {moment(hold.created)})"


def _verified(found: VerificationEntry) -> str:
    result = "intact" if found.ok else f"damaged: {plural(len(found.problems), 'problem')}"
    return f"{moment(found.at)}, {result}"


def look_up(ref: str, out: Output, *, tensors: bool = False) -> Recorded | None:
    """Look up a checkpoint in the catalog, and print a note if the catalog is not available.

    Returns:
        The checkpoint; None if the catalog does not have it, or there is no catalog.
    """
    from ucformat.errors import NotFound, UcformatError
    from ucformat.settings import load_settings

    try:
        url = load_settings().catalog_url()
        file = None if url is None else file_of(url)
        if url is None or (file is not None and not file.exists()):  # do not create one
            return None
        from ucformat.catalog.catalog import Catalog

        with Catalog(url, read_only=True) as catalog:
            return _look_up(catalog, ref, tensors=tensors)
    except NotFound:
        return None
    except UcformatError as error:
        out.note(f"the catalog is not available: {error.message}")
        return None


def _look_up(catalog: Catalog, ref: str, *, tensors: bool) -> Recorded:
    from ucformat.geometry.tensor import TensorInfo

    entry = _find(catalog, ref)
    above = catalog.lineage(entry.id, depth=1)
    parents = [(e.kind, above.nodes[e.parent]) for e in above.edges]
    found = catalog.tensors(entry.id) if tensors else ()
    return Recorded(
        entry,
        tuple({"kind": kind, "id": node.id, "name": node.name, "url": node.url} for kind, node in parents),
        tuple(TensorInfo(t.name, t.state, t.dtype, t.shape) for t in found),
    )


def _find(catalog: Catalog, ref: str) -> Entry:
    """Look up a checkpoint; for run@step also one that is gone, the last of them."""
    from ucformat.catalog.refs import parse_ref
    from ucformat.errors import NotFound

    try:
        return catalog.get(ref)
    except NotFound:
        parsed = parse_ref(ref)
        if parsed.run is None or not isinstance(parsed.at, int):
            raise
        run = parsed.run.replace("'", "''")
        found = catalog.find(f"run = '{run}' and step = {parsed.at} and state != 'committed'", limit=1)
        if not found:
            raise
        return found[0]
