"""Reads the manifest of a place, and finds inconsistencies of manifests; `format.extents` finds those of sidecars.

Readers refuse an inconsistent manifest when they open it, and inconsistent extents when they first
need them; `verify` reports both. Readers check that extents cover a tensor for the tensors that
they read, `verify` for all.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from ucformat._version import __version__
from ucformat.errors import (
    Inconsistent,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UpgradeNeeded,
)
from ucformat.format.chunking import Grid
from ucformat.format.digest import own_digest, unwritable, with_own_digest
from ucformat.schema import ITEMSIZE
from ucformat.schema.documents import is_tombstone
from ucformat.schema.limits import (
    MAX_ARRAY_DIMS,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_EDGE,
    MAX_SHARDS,
    MAX_SPAN,
    MOST_READS,
    check_json,
)
from ucformat.schema.manifest import FORMAT_VERSION, MANIFEST, Manifest, is_of_unknown_kind
from ucformat.schema.values import loads
from ucformat.storage.base import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.schema.manifest import PerRankDoc, SidecarDoc
    from ucformat.schema.tensors import KindDoc, TensorTable
    from ucformat.storage.base import Store

#: Prefix of the keys of files that are in other checkpoints.
MOUNT = "roots/"
_SOURCE = re.compile(rf"{MOUNT}([0-9]{{1,9}})/(.+)", re.DOTALL)

_NAMED = 5  # problems that an error names
_RANGE_BYTES = (
    22  # of the values of a rank, at least: `{}`, its checksum, and its entry in the index
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint.

    Attributes:
        file: the key of the file that has it.
        name: the name of the tensor that is affected; None if no single one is.
        chunk: the coordinates of the damaged chunk in the tensor's chunk grid; None if it is not a
            chunk.
        kind: whether the file is missing, or its bytes differ from a checksum or digest.
    """

    file: str
    reason: str
    name: str | None = None
    state: str | None = None
    chunk: tuple[int, ...] | None = None
    kind: Literal["missing", "differs", "other"] = "other"

    def __str__(self) -> str:
        tensor = "" if self.name is None else f"{self.name} ({self.state})"
        chunk = "" if self.chunk is None else f" chunk {list(self.chunk)}"
        return f"{tensor}{chunk}{': ' if tensor else ''}{self.reason} [{self.file}]"


class _Head(BaseModel):
    """The fields of every version of the manifest."""

    format: Literal["ucformat"]
    version: int
    requires: object = ()  # in a later version it may have any type


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """Read the manifest of the checkpoint that is committed in a place.

    Raises:
        NotACheckpoint: there is none, or the checkpoint is being removed.
    """
    try:
        data, version = store.read_versioned(MANIFEST)
    except NotFound:
        raise NotACheckpoint(
            f"{store.url} holds no committed checkpoint (no {MANIFEST})",
            hint="an interrupted save or conversion leaves none; run it again to continue",
        ) from None
    try:
        return parse_manifest(data, f"{store.url}/{MANIFEST}"), version
    except IntegrityError:
        if not is_tombstone(data):
            raise
    raise NotACheckpoint(
        f"the checkpoint at {store.url} was deleted, and is being removed",
        hint="`ucp gc --apply` completes that",
    )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest."""
    if (
        (head := _VERSION.match(data))
        and int(head[1]) > FORMAT_VERSION
        and own_digest(data) is not None
    ):
        raise _newer(int(head[1]), where)  # before a table of a million tensors is parsed
    try:
        manifest = Manifest.model_validate_json(data)
        _check_words(data)
    except ValidationError as error:
        _check_head(data, where)
        found = error.errors()
        place = ".".join(map(str, found[0]["loc"]))
        if all(is_of_unknown_kind(fault["type"], fault["loc"], fault["input"]) for fault in found):
            reason = f"is of a kind that this ucformat {__version__} does not know: {str(found[0]['input'])[:100]!r}"
            raise UpgradeNeeded(f"{where}: {place} {reason}") from None
        raise IntegrityError(f"{where} is damaged: {place}: {found[0]['msg']}") from None
    except ValueError as error:
        raise IntegrityError(f"{where} is not a ucformat manifest: {error}") from None
    if manifest.requires or own_digest(data) is None:
        _check_head(data, where)
    if unknown := {kind.dtype for kind in manifest.tensors.kinds} - set(ITEMSIZE):
        reason = f"has tensors of the dtype {min(unknown)[:100]!r}, which this ucformat {__version__} does not know"
        raise UpgradeNeeded(f"{where} {reason}")
    return manifest


def _check_head(data: bytes, where: str) -> None:
    """Raise an error if this is no manifest, is damaged, or is of a later version."""
    try:
        head = _Head.model_validate_json(data)
        _check_words(data)
    except ValidationError as error:
        raise IntegrityError(
            f"{where} is not a ucformat manifest: {error.errors()[0]['msg']}"
        ) from None
    except ValueError as error:
        raise IntegrityError(f"{where} is not a ucformat manifest: {error}") from None
    if (
        own_digest(data) is None
    ):  # in every version: without it a newer one cannot be distinguished from a damaged one
        raise IntegrityError(
            f"{where} is damaged: it does not match the digest at its end",
            hint="restore it from another copy",
        )
    if head.version > FORMAT_VERSION:
        raise _newer(head.version, where)
    if isinstance(head.requires, list) and head.requires:
        reason = f"requires {str(head.requires)[:200]}, which this ucformat {__version__} does not implement"
        raise UpgradeNeeded(f"{where} {reason}")


#: The beginning of manifests as ucformat writes them; those of others may have their members in
#: another order.
_VERSION = re.compile(rb'\{\s*"format":\s*"ucformat",\s*"version":\s*([0-9]{1,9})\s*,')


def _newer(version: int, where: str) -> UpgradeNeeded:
    reason = (
        f"has format version {version}; this ucformat {__version__} reads up to {FORMAT_VERSION}"
    )
    return UpgradeNeeded(f"{where} {reason}")


def _check_words(data: bytes) -> None:
    """Raise ValueError for the numbers NaN and Infinity, which pydantic accepts and JSON does not have."""
    if (b"NaN" in data or b"Infinity" in data) and re.search(rb"[\s\[:,-](NaN|Infinity)", data):
        loads(data)


def manifest_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest as its file: JSON that ends with its digest."""
    facts = manifest.model_dump_json(indent=1, exclude={"digest", "tensors"}).encode()
    return with_own_digest(b'%s,\n "tensors": %s\n}' % (facts[:-2], manifest.tensors.as_json()))


def checked_manifest(manifest: Manifest, data: bytes | None = None) -> tuple[bytes, Manifest]:
    """The file of a manifest, and the manifest as every reader gets it: what none would open must replace nothing."""
    try:
        if data is None:
            check_json(manifest.model_dump(exclude={"tensors"}), "it", MAX_DEPTH + 3)
            data = manifest_bytes(manifest)
        parsed = parse_manifest(data, "it")
        refuse("it", manifest_problems(parsed))
    except (UcformatError, ValueError, RecursionError) as error:
        raise unwritable(
            "the manifest", error.message if isinstance(error, UcformatError) else error
        ) from error
    return data, parsed


def find_manifest(store: Store, absent: type[UcformatError] = NotACheckpoint) -> Manifest | None:
    """The manifest of the checkpoint that is committed in a place; None if there is none.

    Args:
        absent: the errors of `read_manifest` that count as none (default: that nothing is
            committed).
    """
    try:
        return read_manifest(store)[0]
    except absent:
        return None


def refuse(where: str, found: Iterable[Problem]) -> None:
    """Raise an error if there are problems."""
    wrong = tuple(found)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise Inconsistent(
            f"{where}: " + "; ".join(map(str, islice(wrong, _NAMED))) + more, problems=wrong
        )


def manifest_problems(manifest: Manifest) -> Iterator[Problem]:
    """Find the inconsistencies of a manifest; no other file is read."""
    yield from _table_problems(manifest.tensors, has_sidecar=manifest.sidecar is not None)
    stored = (
        {manifest.tensors.names[n] for n in set(manifest.tensors.name)} if manifest.aliases else ()
    )
    for name, of in manifest.aliases.items():
        if name in stored:
            yield Problem(MANIFEST, f"{name!r} is stored, and an alias of {of!r} too")
        elif of not in stored:
            target = "another alias" if of in manifest.aliases else "not stored"
            yield Problem(MANIFEST, f"{name!r} is an alias of {of!r}, which is {target}")
    if manifest.per_rank is not None:
        yield from per_rank_problems(manifest.per_rank)
    if manifest.sidecar is not None:
        yield from _sources(manifest.sidecar)
    yield from _repeated(manifest)


def _table_problems(table: TensorTable, *, has_sidecar: bool) -> Iterator[Problem]:
    wrong = {
        n: reason
        for n, kind in enumerate(table.kinds)
        if (reason := _kind(kind, has_sidecar=has_sidecar))
    }
    unused = wrong.keys() - set(table.kind) if wrong else ()
    yield from (Problem(MANIFEST, f"{wrong[n]} (kind number {n})") for n in unused)
    found: dict[int, str] = {}
    arrays = {n for n, kind in enumerate(table.kinds) if kind.path is not None}
    if arrays and (not table.digest or None in table.digest):
        listed = zip(table.kind, table.digest or repeat(None), strict=False)
        rows = (
            row for row, (kind, digest) in enumerate(listed) if digest is None and kind in arrays
        )
        found = dict.fromkeys(rows, "the manifest gives it no digest")
    if wrong:
        found |= {row: wrong[kind] for row, kind in enumerate(table.kind) if kind in wrong}
    found |= dict.fromkeys(table.repeated(), "the manifest lists it twice")
    for row, reason in sorted(found.items()):
        yield Problem(
            MANIFEST, reason, table.names[table.name[row]], table.kinds[table.kind[row]].state
        )


def _kind(kind: KindDoc, *, has_sidecar: bool) -> str | None:
    """What is wrong with all tensors of a kind; None if nothing is."""
    shape, chunk, shard = kind.shape, kind.chunk, kind.shard
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_EDGE:
        return "the manifest gives it an invalid shape"
    if kind.path is None:
        return None if has_sidecar else "the manifest gives it no path, and there is no sidecar"
    if len(shape) > MAX_ARRAY_DIMS:
        return f"the manifest gives it an array of {len(shape)} dims; it may have {MAX_ARRAY_DIMS}"
    if chunk is None or shard is None or not len(shape) == len(chunk) == len(shard):
        return "the manifest gives it an invalid chunk grid"
    if shard != chunk and any(s % c for s, c in zip(shard, chunk, strict=True)):
        return "the manifest gives it an invalid chunk grid"
    if kind.nbytes <= MAX_SHARDS:  # of at least a byte each
        return None
    count = Grid(shape, chunk, shard, ITEMSIZE[kind.dtype]).count
    return (
        f"the manifest gives it an invalid number of shards ({count})"
        if count > MAX_SHARDS
        else None
    )


def per_rank_problems(doc: PerRankDoc) -> Iterator[Problem]:
    """Find out why the files with the values of ranks do not have those of each rank once."""
    if len(set(doc.names)) < len(doc.names):
        yield Problem(MANIFEST, "the manifest lists a name of values of ranks twice")
    end = 0
    for file in doc.files:
        path = repr(file.path[:200])
        if file.first != end:
            yield Problem(
                MANIFEST, f"{path} has the values of ranks from {file.first} on, not from {end} on"
            )
        if file.nbytes < _RANGE_BYTES * file.ranks + 4:
            yield Problem(
                MANIFEST,
                f"{path} has {file.nbytes} bytes, too few for the values of {file.ranks} ranks",
            )
        end = file.first + file.ranks
    if end != doc.ranks:
        yield Problem(
            MANIFEST,
            f"the manifest has files with the values of {end} ranks, and {doc.ranks} ranks",
        )


def place_of(path: str, roots: Sequence[str]) -> str:
    """Where a file of another checkpoint is, the same for all spellings of its root and for roots in one another."""
    root, key = _below_root(path, roots) or (".", path)
    scheme, _, rest = root.rpartition("://")
    rest = rest.removeprefix("localhost") if scheme else rest
    return f"{scheme.lower() or 'file'}://{posixpath.normpath(f'{unquote(rest)}/{key}')}"


def _below_root(path: str, roots: Sequence[str]) -> tuple[str, str] | None:
    """The root that a path names, and the rest; None if it names none."""
    match = _SOURCE.fullmatch(path)
    return (roots[int(match[1])], match[2]) if match and int(match[1]) < len(roots) else None


def _repeated(manifest: Manifest) -> Iterator[Problem]:
    """Files that are named so often that reading one for each name would read far more than it has."""
    named = [(doc.path, doc.nbytes) for doc in manifest.files]
    if manifest.sidecar is not None:
        sources = (s for s in manifest.sidecar.sources if s.digest is not None)
        named += ((place_of(s.path, manifest.sidecar.roots), s.nbytes) for s in sources)
    named += manifest.tensors.shared_folders()
    if max(Counter(path for path, _ in named).values(), default=0) > MOST_READS:
        from ucformat.reading.repeats import first_repeated

        path = first_repeated(ByteRange(path, 0, min(nbytes, MAX_SPAN)) for path, nbytes in named)
        if path is not None:
            yield Problem(
                MANIFEST,
                f"the manifest names {path[:200]!r} so often that it is far more than it has",
            )


def _sources(doc: SidecarDoc) -> Iterator[Problem]:
    seen = set()
    for source in doc.sources:
        if _below_root(source.path, doc.roots) is None:
            yield Problem(
                MANIFEST,
                f"the source {source.path[:200]!r} is not below a root that the manifest lists",
            )
        elif source.path in seen:
            yield Problem(MANIFEST, f"the source {source.path[:200]!r} is listed twice")
        seen.add(source.path)
