"""Fingerprints of foreign checkpoints, which record none themselves, for the catalog."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ucformat.catalog.loading import load_by_id
from ucformat.catalog.recording import Found
from ucformat.catalog.stamp import now
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import ChecksumError, Conflict, UcformatError, UsageError
from ucformat.exporters.base import Span
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import text_of, total
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.batches import Failure
from ucformat.jobs.inputs import Input
from ucformat.jobs.opening import recordable
from ucformat.jobs.run import naming_place, run, workers_for
from ucformat.reading.execute import read_fingerprint
from ucformat.reading.readable import TRACKERS
from ucformat.schema import FINGERPRINT, ITEMSIZE
from ucformat.storage.wrappers import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.export_files import ExportJob
    from ucformat.schema.tensors import TensorTable


def compute_fingerprints(
    ck: Checkpoint, infos: Sequence[TensorInfo], advance: Callable[[int], None]
) -> dict[Key, str]:
    """Read tensors, and compare what is read with the checksums in their files.

    Args:
        advance: called with the bytes of each tensor that was read.

    Raises:
        ChecksumError: a file is damaged.
        Conflict: a file was changed since the checkpoint was opened.
    """
    fingerprints = {}
    with closing(Input(ck, verify=True)) as read:
        if read.verifier is not None:
            for info in infos:
                read.verifier.expect(info, ck.source.extents(info.key), None)
        workers = workers_for(ck.store)
        for info, text in run(partial(read_fingerprint, ck.source), infos, workers):
            fingerprints[info.key] = text
            advance(info.nbytes)
        if read.verifier is not None:
            read.verifier.complete()
    check_unchanged(ck.store, "its fingerprints are not recorded", TRACKERS)
    return fingerprints


def with_fingerprints(tensors: TensorTable, fingerprints: Mapping[Key, str]) -> TensorTable:
    """A table of tensors with these fingerprints."""
    column = [fingerprints.get(Key(doc.name, doc.state)) for doc in tensors]
    return tensors.model_copy(update={"fingerprint": column if any(column) else []})


def exported_fingerprints(job: ExportJob, exported: Checkpoint) -> dict[Key, str]:
    """The fingerprints of an export's tensors: those of the source's tensors, or computed when they were written.

    Names prove nothing here. What is compared is where each box of a tensor lies in the files: in
    what was written and in what is found by the reader of the format. Tensors of which the source
    has no elements, such as numbers that the format stores as tensors, are read; what is linked,
    and has no fingerprint in the source, is left out.
    """
    recorded = job.source.metadata.fingerprints
    written, linked = _written(job)
    fingerprints, others = {}, []
    for info in exported.tensors.values():
        places = {
            e.box: _place(f"{exported.store.url}/{e.file}", e.offset, e.box, e.strides)
            for e in single_extents(exported.source.extents(info.key))
            if e.box.size
        }
        origins = {box: written.get(place) for box, place in places.items()}
        text = _of_boxes(info, origins, recorded)
        if text is not None:
            fingerprints[info.key] = text
        elif linked.isdisjoint(place[0] for place in places.values()):
            others.append(info)
    return fingerprints | compute_fingerprints(exported, others, lambda _nbytes: None)


def _written(job: ExportJob) -> tuple[dict[_Place, _Written], set[str]]:
    """The boxes of tensors in the files of an export by their places, and the files that are linked."""
    written: dict[_Place, _Written] = {}
    links: dict[str, str] = {}  # file of the source -> file of the export
    for file in job.target.files:
        at, sums, key = 0, iter(job.sums.get(file.key, ())), f"{job.store.url}/{file.key}"
        if file.link is not None:
            links[file.link.key] = key
            continue
        for part in file.parts():
            if isinstance(part, Span):
                unit = ITEMSIZE[part.dtype]
                for info, piece in part.pieces:
                    strides = [s * unit for s in piece.strides]
                    place = _place(key, at + piece.offset * unit, piece.box, strides)
                    written[place] = info, next(sums, None)
            at += len(part) if isinstance(part, bytes) else part.nbytes
    for info in job.infos if links else ():
        for e in single_extents(job.source.source.extents(info.key)):
            if e.file in links:
                written[_place(links[e.file], e.offset, e.box, e.strides)] = info, None
    return written, set(links.values())


#: A file, a byte of it, a box of a tensor that begins there, and its strides in bytes.
_Place = tuple[str, int, Box, tuple[int, ...]]
#: A tensor of which a box was written, and the part of its fingerprint, if it was computed.
_Written = tuple["TensorInfo", "Sums | None"]


def _place(file: str, offset: int, box: Box, strides: Sequence[int]) -> _Place:
    """Where a box is; the strides of dims of a single element, which mean nothing, are zeros."""
    steps = (s if n > 1 else 0 for n, s in zip(box.shape, strides, strict=True))
    return file, offset, box, tuple(steps)


def _of_boxes(
    info: TensorInfo,
    origins: Mapping[Box, _Written | None],
    recorded: Mapping[Key, str | None],
) -> str | None:
    """The fingerprint of a tensor from the tensors of which its boxes were written; None if they do not tell it."""
    sources, parts = set(), []
    for origin in origins.values():
        if origin is None or (origin[0].shape, origin[0].itemsize) != (info.shape, info.itemsize):
            return None
        sources.add(origin[0].key)
        parts.append(origin[1])
    if sum(box.size for box in origins) != info.size:
        return None
    if len(sources) == 1 and (text := recorded.get(*sources)) is not None:
        return text
    return None if None in parts else text_of(total(cast("list[Sums]", parts)))


def record_fingerprints(
    catalog: Catalog,
    places: Sequence[tuple[str, str]],
    options: Mapping[str, Any] | None,
    progress: Callable[[int, int], None] | None,
    *,
    listings: Mapping[str, str],
    strict: bool,
) -> tuple[Failure, ...]:
    """Record the fingerprints that the records of checkpoints lack; those of one are recorded together.

    Args:
        places: places of recorded checkpoints, with the ids of these.
        options: those with which foreign ones are opened.
        progress: called with the bytes done and in all.
        listings: the hashes of the file listings of places.
        strict: whether a failure is an error.

    Returns:
        The failures, if they are no errors.
    """
    with catalog.database.reading() as c:
        entries = load_by_id(c, [checkpoint for _, checkpoint in places], now())
    by_id = {e.id: (url, e) for (url, _), e in zip(places, entries, strict=True)}  # copies once
    lacking = [
        (url, entry)
        for url, entry in by_id.values()
        if not all(str(t.digest).startswith(FINGERPRINT) for t in catalog.tensors(entry.id))
    ]
    done, in_all = 0, sum(entry.nbytes for _, entry in lacking if entry.kind != "ucformat")
    failures = []

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, in_all)

    for url, entry in lacking:
        try:
            with naming_place(url):
                computed = _with_computed(url, entry, options, advance)
            catalog.record_all([replace(computed, listing=listings.get(url))])
        except UcformatError as error:
            if strict:
                raise
            failures.append(Failure(url, error.message))
    return tuple(failures)


def _with_computed(
    url: str, entry: Entry, options: Mapping[str, Any] | None, advance: Callable[[int], None]
) -> Found:
    """A recorded checkpoint with the fingerprints of its tensors."""
    if entry.kind == "ucformat":
        raise UsageError(
            f"{url} is a universal checkpoint whose manifest lacks fingerprints, and the catalog "
            "keeps only those of foreign ones",
            hint="`ucp convert SRC DST` writes one with them; of a virtual checkpoint: `ucp register "
            "SRC DST --virtual --checksums`",
        )
    ck = open_checkpoint(url, options=options)
    if ck.id != entry.id:
        raise Conflict(
            f"{url} is another checkpoint than the one that was just registered there",
            hint="run it again when no program writes there",
        )
    try:
        fingerprints = compute_fingerprints(ck, list(ck.tensors.values()), advance)
    except ChecksumError as error:
        raise ChecksumError(
            error.message,
            hint="restore the file from another copy, and run it again; the checkpoint is "
            "registered, without fingerprints",
        ) from error
    manifest = recordable(ck).manifest
    tensors = with_fingerprints(manifest.tensors, fingerprints)
    return Found(manifest.model_copy(update={"tensors": tensors}), url, ck.kind)
