"""Opening by reference: a path or a url, or what the catalog knows by run and step, alias or id."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, NotFound, UcformatError
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.storage.base import Store
    from ucformat.views.document import Steps

__all__ = ["open_reference"]


def open_reference(
    place: str | PathLike[str] | Store,
    *,
    view: Steps | None = None,
    roots: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
    options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint in place, reading kilobytes of it; nothing in it is ever executed.

    Args:
        place: a path or url of a universal checkpoint, or of one that a known engine wrote; or, of one that the catalog
            knows, `run@step`, `run@latest`, `alias:name`, its id or the beginning of that. A path that exists wins.
        view: see its tensors through these steps, as `Checkpoint.view` does: a preset, a layout file, or a list.
        roots: a place, or places, in which a virtual checkpoint's files may lie, besides those that the settings name
            (`UCP_ROOTS`) and those of which this user has registered checkpoints so.
        options: what the files of a foreign checkpoint do not say, such as how they are laid out; each kind of
            checkpoint has its own (docs/sources).

    Raises:
        NotFound: there is nothing at that place, or the catalog knows no such checkpoint.
        NotACheckpoint: what is there is not a checkpoint, or not a committed one.
        UsageError: the reference matches several checkpoints.
    """
    given = as_strings(roots)
    found = _open(place, lambda: (*given, *allowed_roots()), options)
    return found if view is None else found.view(view)


def _open(
    place: str | PathLike[str] | Store, roots: Callable[[], Sequence[str]], options: Mapping[str, Any] | None
) -> Checkpoint:
    if not isinstance(place, str) or not _is_reference(place):
        return open_checkpoint(place, roots=roots, options=options)
    from ucformat.catalog.catalog import Catalog
    from ucformat.settings import load_settings

    if load_settings().catalog_url() is None:
        raise NotFound(
            f"there is no {place}, and no catalog to look it up in", hint="check the path, or set UCP_CATALOG"
        )
    with Catalog(read_only=True) as catalog:
        entry = catalog.get(place)
        if entry.state != "committed":
            hint = f"`ucp restore {place}` brings it back" if entry.state == "deleted" else "its bytes are gone"
            raise NotFound(f"the checkpoint {place} is {entry.state}", hint=hint)
        failure: UcformatError | None = None
        for url in entry.urls:
            try:
                ck = open_checkpoint(url, roots=roots, options=options)
                _must_be_recorded(catalog, entry, ck, url)
            except UcformatError as error:  # it may lie elsewhere, too
                failure = failure or error
                continue
            return ck
    raise failure or NotFound(
        f"the catalog knows {place}, but no place where it lies", hint="`ucp register PLACE` tells it one"
    )


def _must_be_recorded(catalog: Catalog, entry: Entry, ck: Checkpoint, url: str) -> None:
    """See that what lies at a place is what the catalog recorded there.

    Raises:
        NotFound: it is another checkpoint.
        IntegrityError: it says to be the same, but its manifest was changed.
    """
    if ck.kind != "ucformat":  # engines write a step again in place, and then that is meant
        return
    if ck.id != entry.id:
        raise NotFound(
            f"at {url} lies another checkpoint by now, {ck.id}", hint=f"`ucp register {url}` makes the catalog know it"
        )
    reason = catalog.contradiction(ck.manifest, url)
    if reason is not None:
        raise IntegrityError(reason, hint="restore it from another copy; by its path it is opened as it is")


def _is_reference(text: str) -> bool:
    """Whether this can only be looked up: no place, and nothing is there under this name."""
    if "://" in text or text.startswith(("/", "./", "../", "~")) or os.path.exists(text):  # noqa: PTH110 - never fails
        return False
    run, at, which = text.rpartition("@")
    hexadecimal = len(text) >= 4 and not set(text) - set("0123456789abcdef")
    return text.startswith("alias:") or bool(at and run and which) or hexadecimal
