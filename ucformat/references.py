"""Opening by reference: a path or a url, or a run and step, alias or id in the catalog."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, NotACheckpoint, NotFound, UcformatError, UsageError
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_strings, split_url
from ucformat.storage.wrappers import WatchedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.storage.base import Store
    from ucformat.views.document import Steps

__all__ = [
    "expand_references",
    "open_catalog",
    "open_entry",
    "open_place",
    "open_reference",
    "open_watched",
]

_RANGE = re.compile(r"(.+)@(\d{1,18})\.\.(\d{1,18})", re.ASCII)


def open_reference(
    place: str | PathLike[str] | Store,
    *,
    view: Steps | None = None,
    roots: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
    options: Mapping[str, Any] | None = None,
    signed_by: str | PathLike[str] | Iterable[str | PathLike[str]] | None = None,
    lossy: bool = False,
    older: bool = False,
) -> Checkpoint:
    """Open a checkpoint in place, reading kilobytes of it; nothing in it is ever executed.

    Args:
        place: a path or url of a universal checkpoint, or of one that a known engine wrote; or, of
            a checkpoint in the catalog, `run@step`, `run@latest`, `alias:name`, its id or a prefix
            of that. An existing path takes precedence.
        view: the steps of a view, as in `Checkpoint.view`: a preset, a layout file, or a list
            (default: no view).
        roots: a place, or places, that may hold a virtual checkpoint's files, in addition to those
            in the settings (`UCP_ROOTS`) and those that this user has registered.
        options: facts that the files of a foreign checkpoint lack, such as its layout; each kind of
            checkpoint has its own (docs/sources).
        signed_by: open only a universal checkpoint whose manifest has a signature by one of these:
            PEM files of public keys or certificates, `sigstore:ISSUER,IDENTITY`, or `trusted` for
            the signers in the settings (default: signatures are not looked for).
        lossy: allow to read tensors that were encoded with loss (`Checkpoint.lossy`; default: that
            is an error).
        older: allow to read tensors that are older than the checkpoint (`Checkpoint.older`; default:
            that is an error).

    Raises:
        UnsafeError: it is not signed as `signed_by` demands.
        NotFound: the place is empty or does not exist, or the catalog has no such checkpoint.
        NotACheckpoint: the place holds no checkpoint, or no committed one.
        UsageError: the reference matches several checkpoints.
    """
    checkpoint, _ = _open(place, as_strings(roots), options)
    if signed_by is not None:
        from ucformat.signatures import check_signed

        check_signed(checkpoint, signed_by)
    if lossy:
        checkpoint = checkpoint.with_lossy()
    if older:
        checkpoint = checkpoint.with_older()
    return checkpoint if view is None else checkpoint.view(view)


def expand_references(places: Iterable[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """Replace each reference to a range of steps, `run7@1000..2000`, by the ids of the run's checkpoints in it.

    Raises:
        NotFound: a range has no checkpoint, or there is no catalog.
    """
    out: list[str | PathLike[str]] = []
    for place in places:
        match = _RANGE.fullmatch(place) if isinstance(place, str) and _is_reference(place) else None
        if match is None:
            out.append(place)
            continue
        run, first, last = match[1], int(match[2]), int(match[3])
        if last < first:
            raise UsageError(
                f"the range {place} ends before it begins", hint=f"write {run}@{last}..{first}"
            )
        with open_catalog(str(place)) as catalog:
            out += [entry.id for entry in catalog.between(run, first, last)]
    return out


def open_catalog(ref: str) -> Catalog:
    """Open the catalog of the settings for reading."""
    from ucformat.catalog.catalog import Catalog
    from ucformat.settings import load_settings

    if load_settings().catalog_url() is None:
        raise NotFound(
            f"there is no {ref}, and no catalog to look it up in",
            hint="check the path, or set UCP_CATALOG",
        )
    return Catalog(read_only=True)


_P = TypeVar("_P", bound="str | PathLike[str] | Store")


def open_watched(place: _P, watch: Callable[[Store], WatchedStore]) -> tuple[Checkpoint, _P | str]:
    """Open a checkpoint through stores that the caller makes; see `open_reference`.

    Returns:
        the checkpoint, and the path or url to which the reference refers.
    """
    return _open(place, watch=watch)


def _open(
    place: _P,
    roots: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    watch: Callable[[Store], WatchedStore] = WatchedStore,
) -> tuple[Checkpoint, _P | str]:
    if not isinstance(place, str) or not _is_reference(place):
        return open_place(place, roots, options, watch), place
    with open_catalog(place) as catalog:
        entry = catalog.get(place)
        if entry.state != "committed":
            hint = (
                f"`ucp restore {place}` brings it back"
                if entry.state == "deleted"
                else "what others need of it can be opened by its path"
                if entry.state == "thinned"
                else "its bytes are gone"
            )
            raise NotFound(f"the checkpoint {place} is {entry.state}", hint=hint)
        return open_entry(catalog, entry, place, roots, options, watch)


def open_entry(
    catalog: Catalog,
    entry: Entry,
    name: str,
    roots: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    watch: Callable[[Store], WatchedStore] = WatchedStore,
) -> tuple[Checkpoint, str]:
    """Open a committed checkpoint of the catalog at the first of its places where it is; see `open_watched`.

    Args:
        name: what errors call it.
    """
    failure: UcformatError | None = None
    for url in entry.urls:
        try:
            ck = _opened_recorded(url, roots, options, watch)
            _must_be_recorded(catalog, entry, ck, url)
        except UcformatError as error:  # another place may have it, too
            failure = failure or error
            continue
        return ck, url
    raise failure or NotFound(
        f"the catalog knows {name}, but no place of it", hint="`ucp register PLACE` adds one"
    )


def _opened_recorded(
    url: str,
    roots: tuple[str, ...],
    options: Mapping[str, Any] | None,
    watch: Callable[[Store], WatchedStore],
) -> Checkpoint:
    """Open a place that the catalog has recorded; where nothing is left, the error has the command that forgets it."""
    try:
        return open_place(url, roots, options, watch)
    except NotACheckpoint:  # something else is there, or what a writer has left
        raise
    except NotFound as error:
        hint = f"mount its disk; or, if the checkpoint no longer exists: ucp reindex {url} --forget"
        raise NotFound(error.message, hint=hint) from error


def open_place(
    place: str | PathLike[str] | Store,
    roots: tuple[str, ...],
    options: Mapping[str, Any] | None,
    watch: Callable[[Store], WatchedStore],
) -> Checkpoint:
    """Open a path, a url or a store, which is no reference; see `open_reference`."""
    ck = open_checkpoint(
        place, roots=lambda: (*roots, *allowed_roots()), options=options, watch=watch
    )
    scheme, path = split_url(place) if isinstance(place, str | os.PathLike) else ("url", "")
    url = (
        ck.url
        if scheme == "url"
        else os.path.abspath(path)  # noqa: PTH100
        if scheme in ("", "file")
        else str(place)
    )
    ck.opened, ck.roots = (getattr(ck.foreign, "place", url), options or {}), roots
    return ck


def _must_be_recorded(catalog: Catalog, entry: Entry, ck: Checkpoint, url: str) -> None:
    """Check that the checkpoint at a place is the one that the catalog recorded there."""
    if ck.kind != "ucformat":  # engines rewrite a step in place, and then the new one is wanted
        return
    if ck.id != entry.id:
        raise NotFound(
            f"there is another checkpoint at {url} by now, {ck.id}",
            hint=f"`ucp register {url}` records it",
        )
    reason = catalog.contradiction(ck.manifest, url)
    if reason is not None:
        raise IntegrityError(
            reason, hint="restore it from another copy; its path opens it without this check"
        )


def _is_reference(text: str) -> bool:
    """Whether this can only be a reference to the catalog: no url, no path syntax, and no existing path."""
    if "://" in text or text.startswith(("/", "./", "../", "~")) or os.path.exists(text):  # noqa: PTH110 - never fails
        return False
    run, at, which = text.rpartition("@")
    hexadecimal = len(text) >= 4 and not set(text) - set("0123456789abcdef")
    return text.startswith("alias:") or bool(at and run and which) or hexadecimal
