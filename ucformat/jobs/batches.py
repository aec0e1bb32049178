"""Recording opened checkpoints in a catalog, many in one transaction."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ucformat.catalog.recording import Found
from ucformat.catalog.refs import same_url
from ucformat.errors import UcformatError
from ucformat.jobs.documents import take_over_document
from ucformat.jobs.run import naming_place
from ucformat.schema.documents import CatalogDoc
from ucformat.schema.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog

# the most checkpoints that are recorded in one transaction; seconds that one waits for it
_TOGETHER, _MOMENT = (64, 1.0)


@dataclass(frozen=True, slots=True)
class Failure:
    """A place that looked like a checkpoint and could not be registered."""

    url: str
    message: str


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """An opened checkpoint as it is recorded; plain data, which a worker process can send.

    `keys` are those of the files of a foreign one; a universal one's are all below its folder.
    `unread` are the files in a foreign one's folder whose meaning is unknown, and `step` is the one
    in its files.
    """

    url: str
    kind: str
    manifest: Manifest
    files: tuple[int, int] | None
    doc: CatalogDoc | None
    keys: tuple[str, ...] | None
    unread: tuple[str, ...] = ()
    step: int | None = None

    def dump(self) -> str:
        """As JSON, for another process."""
        doc = None if self.doc is None else self.doc.model_dump(mode="json")
        manifest = self.manifest.model_dump_json()
        return json.dumps(
            {
                **{f.name: getattr(self, f.name) for f in fields(self)},
                "doc": doc,
                "manifest": manifest,
            }
        )

    @classmethod
    def parse(cls, text: str) -> OpenedCheckpoint:
        """The checkpoint that `dump` has written."""
        content = json.loads(text)
        doc = None if content["doc"] is None else CatalogDoc.model_validate(content["doc"])
        manifest = Manifest.model_validate_json(content["manifest"])
        files = (
            None
            if content["files"] is None
            else (int(content["files"][0]), int(content["files"][1]))
        )
        keys = None if content["keys"] is None else tuple(content["keys"])
        return cls(
            content["url"],
            content["kind"],
            manifest,
            files,
            doc,
            keys,
            tuple(content["unread"]),
            content["step"],
        )


#: A place, its checkpoint or the reason why it cannot be opened, and how many places are left.
Opened = tuple[str, OpenedCheckpoint | UcformatError, int]


@dataclass(frozen=True, slots=True)
class Done:
    """The places where checkpoints were recorded, with their ids; the failures; and unread files by place."""

    present: list[tuple[str, str]]
    failures: tuple[Failure, ...]
    unread: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """How to record: the run, what was given and replaces what is recorded, and whether failures are errors."""

    run: str | None = None
    replace_config: bool = False
    strict: bool = False
    trust: bool = False
    replace_step: bool = False


def record_all(
    catalog: Catalog,
    opened: Iterable[Opened],
    options: RecordOptions,
    progress: Callable[[int, int], None] | None,
    *,
    listings: Mapping[str, str] | None = None,
) -> Done:
    """Record opened checkpoints; one that could not be opened or recorded is a failure, or if `strict` an error."""
    present, failures, done = [], [], 0
    unread: dict[str, tuple[str, ...]] = {}
    for batch in _batches(opened):
        checkpoints = [
            (root, outcome) for root, outcome, _ in batch if not isinstance(outcome, UcformatError)
        ]
        refused = _record(catalog, checkpoints, options, listings or {})
        for root, outcome, left in batch:
            error = outcome if isinstance(outcome, UcformatError) else refused.get(root)
            if error is not None and options.strict:
                raise error
            if error is not None:
                failures.append(Failure(root, error.message))
            elif not isinstance(outcome, UcformatError):
                present.append((outcome.url, outcome.manifest.id))
                if outcome.unread:
                    unread[outcome.url] = outcome.unread
            done += 1
            if progress is not None:
                progress(done, done + left)
    return Done(present, tuple(failures), unread)


def _batches(opened: Iterable[Opened]) -> Iterator[list[Opened]]:
    """Those that are recorded together: as many as were opened in a moment, so that an interruption loses little."""
    batch: list[Opened] = []
    begun = time.monotonic()
    for outcome in opened:
        batch.append(outcome)
        if len(batch) == _TOGETHER or time.monotonic() - begun > _MOMENT:
            yield batch
            batch, begun = [], time.monotonic()
    if batch:
        yield batch


def _record(
    catalog: Catalog,
    opened: Sequence[tuple[str, OpenedCheckpoint]],
    options: RecordOptions,
    listings: Mapping[str, str],
) -> dict[str, UcformatError]:
    """Record checkpoints in one transaction, or each on its own if one of them is refused.

    Returns the errors, by place. The documents beside checkpoints are imported one by one.
    """
    new = {root: _to_record(root, ck, options, listings) for root, ck in opened}
    refused: dict[str, UcformatError] = {}
    if not new:
        return {}
    try:
        with naming_place(opened[0][1].url):
            catalog.record_all(new.values())
    except UcformatError as error:
        if len(opened) == 1:
            return dict.fromkeys(new, error)
        for root, ck in opened:
            refused |= _record(catalog, [(root, ck)], options, listings)
        return refused
    for root, ck in opened:
        if ck.doc is not None:
            try:
                with naming_place(ck.url):
                    entry = catalog.import_document(
                        ck.manifest.id, ck.doc, ck.url, trust=options.trust
                    )
                    if options.trust:
                        take_over_document(catalog, ck.manifest.id, ck.url)
                    # the option overrides the document
                    if options.run is not None and entry.run != options.run:
                        catalog.record_all([new[root]])
            except UcformatError as error:
                refused[root] = error
    return refused


def _to_record(
    root: str, ck: OpenedCheckpoint, options: RecordOptions, listings: Mapping[str, str]
) -> Found:
    listing = listings.get(root) if same_url(root) == same_url(ck.url) else None
    return Found(
        ck.manifest,
        ck.url,
        ck.kind,
        options.run,
        ck.files,
        options.replace_config,
        listing,
        options.replace_step,
    )
