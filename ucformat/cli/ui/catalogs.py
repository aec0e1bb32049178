"""What commands print that have written a checkpoint."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucformat.cli.ui.text import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry, HoldEntry, NoteEntry, VerificationEntry
    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output


def print_written(ck: Checkpoint, seconds: float, out: Output, *, nothing: bool = False) -> None:
    """Print the place, id and size of a checkpoint, and how fast it was written."""
    tensors = 0 if nothing else len(ck.tensors)
    nbytes = 0 if nothing else sum(info.nbytes for info in ck.tensors.values())
    found = {
        "url": ck.url,
        "id": ck.manifest.id,
        "tensors": tensors,
        "bytes": nbytes,
        "seconds": round(seconds, 3),
        "mb_per_s": round(nbytes / seconds / 1e6, 3),
    }
    amount = f"{plural(tensors, 'tensor')}, {bytes_text(nbytes)} in {seconds:.1f} s, {found['mb_per_s']:,.0f} MB/s"
    out.result(
        lambda: [f"{ck.url}  {ck.manifest.id}  {amount}"], lambda: found, lambda: [ck.manifest.id]
    )


# The catalog of a command, and its checkpoints as JSON.


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


def file_of(url: str) -> Path | None:
    """The file of a catalog."""
    from pathlib import Path

    from ucformat.settings import local_path

    if "://" not in url:
        return local_path(url, absolute=False)
    return Path(url.partition("://")[2][1:].partition("?")[0]) if url.startswith("sqlite") else None


def entry_data(entry: Entry) -> dict[str, Any]:
    """The JSON of a checkpoint in the catalog, the same in all commands."""
    return {
        "id": entry.id,
        "name": entry.name,
        "kind": entry.kind,
        "state": entry.state,
        "run": entry.run,
        "step": entry.step,
        "commits": entry.commits,
        "launch": entry.launch,
        "created": instant(entry.created),
        "recorded": instant(entry.recorded),
        "deleted": instant(entry.deleted),
        "purge_after": instant(entry.purge_after),
        "tensors": entry.tensors,
        "bytes": entry.nbytes,
        "files": entry.files,
        "files_bytes": entry.files_nbytes,
        "format_version": entry.format_version,
        "engine": entry.engine,
        "topology": dict(entry.topology),
        "config": dict(entry.config),
        "urls": list(entry.urls),
        "metrics": dict(entry.metrics),
        "tags": list(entry.tags),
        "aliases": list(entry.aliases),
        "holds": [hold_data(h) for h in entry.holds],
        "notes": [note_data(n) for n in entry.notes],
        "from_documents": list(entry.from_documents),
        "verified": None if entry.verified is None else _verified(entry.verified),
    }


def hold_data(hold: HoldEntry) -> dict[str, Any]:
    """The JSON of a hold."""
    return {
        "number": hold.id,
        "reason": hold.reason,
        "until": instant(hold.until),
        "created": instant(hold.created),
        "who": hold.who,
    }


def note_data(note: NoteEntry) -> dict[str, Any]:
    """The JSON of a note."""
    return {"text": note.text, "created": instant(note.created), "who": note.who}


def _verified(found: VerificationEntry) -> dict[str, Any]:
    return {
        "at": instant(found.at),
        "ok": found.ok,
        "url": found.url,
        "bytes_verified": found.bytes_verified,
        "bytes_unverified": found.bytes_unverified,
        "problems": list(found.problems),
        "tool": found.tool,
    }


def instant(at: datetime | None) -> str | None:
    """The JSON of a time: ISO 8601, in UTC."""
    from datetime import UTC

    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
