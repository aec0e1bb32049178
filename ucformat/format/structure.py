"""What a manifest must not say, and with `format.extents` a sidecar: by this readers refuse, and `verify` names.

No file is read here. Readers refuse a manifest when they open it, and extents when they first need them; whether
extents cover a tensor they prove for what they read, and `verify` for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ValidationError

from ucformat._version import __version__
from ucformat.errors import Inconsistent, IntegrityError, NotACheckpoint, NotFound, UcformatError, UpgradeNeeded
from ucformat.format.arrays import MAX_DIMS, MAX_SHARDS
from ucformat.format.chunking import Grid
from ucformat.format.digest import own_digest, with_own_digest
from ucformat.geometry.tensor import Key
from ucformat.schema.documents import is_tombstone
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.schema.manifest import FORMAT_VERSION, MANIFEST, Manifest, is_of_unknown_kind
from ucformat.schema.values import loads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.schema.manifest import SidecarDoc, TensorDoc
    from ucformat.storage.base import Store

__all__ = [
    "MAX_EDGE",
    "MOUNT",
    "Problem",
    "find_manifest",
    "manifest_bytes",
    "manifest_problems",
    "parse_manifest",
    "read_manifest",
    "refuse",
]

#: How the paths of files begin that lie in other checkpoints.
MOUNT = "roots/"

#: The longest edge of a tensor: what offsets can say.
MAX_EDGE = 1 << 62

_MAX_DIMS = 64  # torch's own limit
_NAMED = 5  # problems of one kind of thing that an error names


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint.

    Attributes:
        file: the key of the file that has it.
        reason: a description.
        name: the name of the tensor that is affected; None if no single one is.
        state: its state.
        chunk: the coordinates of the damaged chunk in the tensor's chunk grid; None if it is not a chunk.
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
    """What every version of the manifest begins with."""

    format: Literal["ucformat"]
    version: int
    requires: object = ()  # of a later version it may be anything


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """The manifest of a place, and the version of the file.

    Raises:
        NotACheckpoint: there is none, or one that is being removed.
        UpgradeNeeded: it was written by a newer version of the format.
        IntegrityError: it is not what its digest says, or cannot be parsed.
    """
    try:
        data, version = store.read_versioned(MANIFEST)
    except NotFound:
        raise NotACheckpoint(
            f"{store.url} holds no committed checkpoint (no {MANIFEST})",
            hint="a save or conversion that was interrupted leaves none; run it again, it continues",
        ) from None
    try:
        return parse_manifest(data, f"{store.url}/{MANIFEST}"), version
    except IntegrityError:
        if not is_tombstone(data):
            raise
    raise NotACheckpoint(
        f"the checkpoint at {store.url} was deleted, and is being removed", hint="`ucp gc --apply` ends that"
    )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes; `where` names them in errors."""
    try:
        head = _Head.model_validate_json(data)
        if b"NaN" in data or b"Infinity" in data:  # pydantic takes them as numbers, JSON does not
            loads(data)
    except ValidationError as error:
        raise IntegrityError(f"{where} is not a ucformat manifest: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise IntegrityError(f"{where} is not a ucformat manifest: {error}") from None
    if own_digest(data) is None:  # of every version: a newer one is not told from a damaged one without it
        raise IntegrityError(
            f"{where} is damaged: it is not what the digest at its end says", hint="restore it from another copy"
        )
    if head.version > FORMAT_VERSION:
        said = f"has format version {head.version}; this ucformat {__version__} reads up to {FORMAT_VERSION}"
        raise UpgradeNeeded(f"{where} {said}")
    if isinstance(head.requires, list) and head.requires:
        said = f"requires {str(head.requires)[:200]}, which this ucformat {__version__} does not implement"
        raise UpgradeNeeded(f"{where} {said}")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        found = error.errors()
        place = ".".join(map(str, found[0]["loc"]))
        if all(is_of_unknown_kind(fault["type"], fault["loc"], fault["input"]) for fault in found):
            said = f"is of a kind that this ucformat {__version__} does not know: {str(found[0]['input'])[:100]!r}"
            raise UpgradeNeeded(f"{where}: {place} {said}") from None
        raise IntegrityError(f"{where} is damaged: {place}: {found[0]['msg']}") from None
    if unknown := {doc.dtype for doc in manifest.tensors} - set(ITEMSIZE):
        said = f"has tensors of the unknown dtype {min(unknown)[:100]!r}, which this ucformat {__version__} cannot read"
        raise UpgradeNeeded(f"{where} {said}")
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file of a manifest, which ends with its digest."""
    return with_own_digest(manifest.model_dump_json(indent=1, exclude={"digest"}).encode())


def find_manifest(store: Store, absent: type[UcformatError] = NotACheckpoint) -> Manifest | None:
    """The manifest of the checkpoint that is committed in a place; None if there is none.

    Args:
        store: the place.
        absent: the errors of `read_manifest` that count as none (default: that nothing is committed).
    """
    try:
        return read_manifest(store)[0]
    except absent:
        return None


def refuse(where: str, found: Iterable[Problem]) -> None:
    """Raise what is wrong, if anything is.

    Args:
        where: the url of the checkpoint.
        found: the problems.

    Raises:
        Inconsistent: there is a problem; it has all of them, and names the first.
    """
    wrong = tuple(found)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise Inconsistent(f"{where}: " + "; ".join(map(str, islice(wrong, _NAMED))) + more, problems=wrong)


def manifest_problems(manifest: Manifest) -> Iterator[Problem]:
    """What is wrong with a manifest, apart from the files that it names."""
    seen: set[Key] = set()
    for doc in manifest.tensors:
        key = Key(doc.name, doc.state)
        reason = "the manifest lists it twice" if key in seen else _tensor(doc, manifest)
        seen.add(key)
        if reason is not None:
            yield Problem(MANIFEST, reason, doc.name, doc.state)
    stored = {key.name for key in seen}
    for name, of in manifest.aliases.items():
        if name in stored:
            yield Problem(MANIFEST, f"{name!r} is stored, and an alias of {of!r} too")
        elif of not in stored:
            chain = "another alias" if of in manifest.aliases else "stored under no such name"
            yield Problem(MANIFEST, f"{name!r} is an alias of {of!r}, which is {chain}")
    if manifest.sidecar is not None:
        yield from _sources(manifest.sidecar)


def _tensor(doc: TensorDoc, manifest: Manifest) -> str | None:
    if len(doc.shape) > _MAX_DIMS or max(doc.shape, default=0) > MAX_EDGE:
        return "the manifest gives it an impossible shape"
    nbytes = math.prod(doc.shape) * ITEMSIZE[doc.dtype]
    if nbytes != doc.nbytes:
        return f"the manifest says {doc.nbytes} bytes, its shape has {nbytes}"
    if doc.path is None:
        return None if manifest.sidecar is not None else "the manifest gives it no path, and there is no sidecar"
    if len(doc.shape) > MAX_DIMS:
        return f"the manifest gives it an array of {len(doc.shape)} dims; it may have {MAX_DIMS}"
    chunk, shard = doc.chunk, doc.shard
    if chunk is None or shard is None or not len(doc.shape) == len(chunk) == len(shard):
        return "the manifest gives it an impossible chunk grid"
    if any(s % c for s, c in zip(shard, chunk, strict=True)):
        return "the manifest gives it an impossible chunk grid"
    if doc.digest is None:
        return "the manifest gives it no digest"
    count = Grid(doc.shape, chunk, shard, ITEMSIZE[doc.dtype]).count
    return f"the manifest gives it an impossible number of shards ({count})" if count > MAX_SHARDS else None


def _sources(doc: SidecarDoc) -> Iterator[Problem]:
    seen = set()
    for source in doc.sources:
        number, _, key = source.path.removeprefix(MOUNT).partition("/")
        below = source.path.startswith(MOUNT) and number.isdecimal() and len(number) < 10 and bool(key)
        if not below or int(number) >= len(doc.roots):
            yield Problem(MANIFEST, f"the source {source.path[:200]!r} lies below no root that the manifest lists")
        elif source.path in seen:
            yield Problem(MANIFEST, f"the source {source.path[:200]!r} is listed twice")
        seen.add(source.path)
