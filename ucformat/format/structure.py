"""Reads the manifest of a place, and finds inconsistencies of manifests; `format.extents` finds those of sidecars.

Readers refuse an inconsistent manifest when they open it, and inconsistent extents when they first
need them; `verify` reports both. Readers check that extents cover a tensor for the tensors that
they read, `verify` for all.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections import Counter
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

from pydantic import ValidationError

from ucformat._version import __version__
from ucformat.errors import (
    Inconsistent,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UpgradeNeeded,
    first_names,
)
from ucformat.format.chunking import Grid
from ucformat.format.digest import own_digest, unwritable, with_own_digest
from ucformat.schema import MANIFEST
from ucformat.schema.limits import (
    MAX_ARRAY_DIMS,
    MAX_BASES,
    MAX_BATCH,
    MAX_BLOSC,
    MAX_DIMS,
    MAX_EDGE,
    MAX_SHARDS,
    MAX_SPAN,
    MOST_READS,
    check_json,
)
from ucformat.schema.manifest import (
    EXTENTS,
    FEATURES,
    FORMAT_MINOR,
    FORMAT_VERSION,
    PACKED,
    VIRTUAL,
    Manifest,
    is_delta,
    is_of_unknown_kind,
    used_features,
)
from ucformat.schema.tensors import BLOSC, TILES
from ucformat.schema.values import loads
from ucformat.storage.base import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.schema.manifest import BaseDoc, DeltasDoc, PerRankDoc, SidecarDoc
    from ucformat.schema.tensors import KindDoc, TensorDoc, TensorTable
    from ucformat.storage.base import Store

#: Prefix of the keys of files that are in other checkpoints.
MOUNT = "roots/"
_SOURCE = re.compile(rf"{MOUNT}([0-9]{{1,9}})/(.+)", re.DOTALL)

#: Prefix of the keys of files of bases.
BASES_FOLDER = "bases/"
# of the name of a base beside the checkpoint: what urls, and some programs, give a meaning, and what is no UTF-8
_ESCAPED = re.compile(r"[\x01-\x1f%?#\\\udc80-\udcff]")

_NAMED = 5  # problems that an error names
# of the values of a rank, at least: `{}`, its checksum, and its entry in the index
_RANGE_BYTES = 22


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint.

    Attributes:
        file: the key of the file that has it, or the place of the base.
        name: the name of the tensor that is affected; None if no single one is.
        chunk: the coordinates of the damaged chunk in the tensor's chunk grid; None if it is not a
            chunk.
        kind: whether the file is missing, its bytes differ from a checksum or digest, or the fault
            is in a base.
    """

    file: str
    reason: str
    name: str | None = None
    state: str | None = None
    chunk: tuple[int, ...] | None = None
    kind: Literal["missing", "differs", "base", "other"] = "other"

    def __str__(self) -> str:
        tensor = "" if self.name is None else f"{self.name} ({self.state})"
        chunk = "" if self.chunk is None else f" chunk {list(self.chunk)}"
        return f"{tensor}{chunk}{': ' if tensor else ''}{self.reason} [{self.file}]"


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
    return committed_manifest(data, store.url), version


def committed_manifest(data: bytes, url: str) -> Manifest:
    """Parse the manifest of a place.

    Raises:
        NotACheckpoint: the checkpoint is being removed.
    """
    try:
        return parse_manifest(data, f"{url}/{MANIFEST}")
    except IntegrityError:
        from ucformat.schema.documents import is_tombstone  # whose models take as long as these

        if not is_tombstone(data):
            raise
    raise NotACheckpoint(
        f"the checkpoint at {url} was deleted, and is being removed",
        hint="`ucp gc --apply` completes that",
    )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a manifest; whether it is one, whole, and of this version is found out before all else."""
    _check_head(data, where)
    try:
        return Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        faults = error.errors()
        place = ".".join(map(str, faults[0]["loc"]))
        if all(is_of_unknown_kind(fault["type"], fault["loc"], fault["input"]) for fault in faults):
            reason = f"is of a kind that this ucformat {__version__} does not know: {str(faults[0]['input'])[:100]!r}"
            raise UpgradeNeeded(f"{where}: {place} {reason}") from None
        raise IntegrityError(f"{where} is damaged: {place}: {faults[0]['msg']}") from None


def _check_head(data: bytes, where: str) -> None:
    """Raise an error if this is no manifest, is damaged, or needs a later reader."""
    try:
        document = loads(data)  # a large tree, which is gone before the manifest is made
    except ValueError as error:
        raise IntegrityError(f"{where} is not a ucformat manifest: {str(error)[:300]}") from None
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int or document.get("format") != "ucformat":
        raise IntegrityError(f"{where} is not a ucformat manifest")
    # in every version: without its digest a newer one cannot be distinguished from a damaged one
    if own_digest(data) is None:
        raise IntegrityError(
            f"{where} is damaged: it does not match the digest at its end",
            hint="restore it from another copy",
        )
    if version > FORMAT_VERSION:
        reason = f"has format version {version}; this ucformat {__version__} reads up to {FORMAT_VERSION}"
        raise UpgradeNeeded(f"{where} {reason}")
    named = document.get("requires", [])
    if isinstance(named, list) and (unknown := [n for n in named if n not in FEATURES]):
        reason = (
            f"requires {str(unknown)[:200]}, which this ucformat {__version__} does not implement"
        )
        raise UpgradeNeeded(f"{where} {reason}")


def manifest_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest as its file: JSON that ends with its digest."""
    written = manifest.model_copy(update={"minor": FORMAT_MINOR})
    few = {"experts", "window"}  # that few checkpoints have
    absent = {name for name in few if getattr(manifest, name) is None}
    facts = written.model_dump_json(indent=1, exclude={"digest", "tensors"} | absent).encode()
    return with_own_digest(b'%s,\n "tensors": %s\n}' % (facts[:-2], manifest.tensors.as_json()))


def checked_manifest(manifest: Manifest, data: bytes | None = None) -> tuple[bytes, Manifest]:
    """The file of a manifest, and the manifest as every reader gets it: what none would open must replace nothing."""
    try:
        if data is None:
            check_json(manifest.model_dump(exclude={"tensors"}), "it")
            data = manifest_bytes(manifest)
        parsed = parse_manifest(data, "it")
        refuse("it", manifest_problems(parsed))
    except (UcformatError, ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, UcformatError) else error
        raise unwritable("the manifest", reason) from error
    return data, parsed


def find_manifest(store: Store, absent: type[UcformatError] = NotACheckpoint) -> Manifest | None:
    """The manifest of the checkpoint that is committed in a place; None if there is none."""
    try:
        return read_manifest(store)[0]
    except absent:
        return None


def refuse(where: str, problems: Iterable[Problem]) -> None:
    """Raise an error if there are problems."""
    listed = tuple(problems)
    if listed:
        raise Inconsistent(f"{where}: {first_names(listed, _NAMED, '; ')}", problems=listed)


def manifest_problems(manifest: Manifest) -> Iterator[Problem]:
    """Find the inconsistencies of a manifest; no other file is read."""
    yield from _base_problems(manifest)
    yield from _step_problems(manifest)
    yield from _delta_problems(manifest)
    yield from _table_problems(
        manifest.tensors, manifest.bases, has_sidecar=manifest.sidecar is not None
    )
    stored = (
        {manifest.tensors.names[n] for n in set(manifest.tensors.name)} if manifest.aliases else ()
    )
    for name, stored_name in manifest.aliases.items():
        if name in stored:
            yield Problem(MANIFEST, f"{name!r} is stored, and an alias of {stored_name!r} too")
        elif stored_name not in stored:
            target = "another alias" if stored_name in manifest.aliases else "not stored"
            yield Problem(MANIFEST, f"{name!r} is an alias of {stored_name!r}, which is {target}")
    if manifest.per_rank is not None:
        yield from per_rank_problems(manifest.per_rank)
    if manifest.sidecar is not None:
        yield from _source_problems(manifest.sidecar)
    yield from _unnamed_features(manifest)
    yield from _repeated(manifest)


def _unnamed_features(manifest: Manifest) -> Iterator[Problem]:
    """Features that the manifest uses and does not name; of what the sidecar uses it is told when that is read."""
    named = set(manifest.requires)
    kinds = manifest.tensors.kinds
    if any(k.in_sidecar for k in kinds) and not named & {PACKED, EXTENTS}:
        reason = f"it has tensors that are no arrays, and requires neither {PACKED} nor {EXTENTS}"
        yield Problem(MANIFEST, reason)
    for feature in used_features(manifest.tensors, manifest.bases):
        if feature not in named:
            yield Problem(
                MANIFEST, f"it has tensors that need {feature}, and does not require them"
            )
    if manifest.sidecar is not None and manifest.sidecar.roots and VIRTUAL not in named:
        yield Problem(MANIFEST, f"it has files elsewhere, and does not require {VIRTUAL}")


def _base_problems(manifest: Manifest) -> Iterator[Problem]:
    ids = [base.id for base in manifest.bases]
    if len(ids) > MAX_BASES:
        yield Problem(MANIFEST, f"it is based on {len(ids)} checkpoints; at most {MAX_BASES}")
    if len(set(ids)) < len(ids):
        yield Problem(MANIFEST, "the manifest lists a base twice")
    if manifest.id in ids:
        yield Problem(MANIFEST, "it is based on itself")

    for base in manifest.bases:
        if sibling_name(base.url) is None and not _is_absolute(base.url):
            reason = "neither absolute nor beside this one"
            yield Problem(MANIFEST, f"its base is at {base.url[:200]!r}, which is {reason}")
    paths = [k.path for k in manifest.tensors.kinds if k.path is not None]
    paths += [*manifest.tensors.path.values(), *(doc.path for doc in manifest.files)]
    for path in (p for p in paths if p.startswith(BASES_FOLDER)):
        yield Problem(MANIFEST, f"{path[:200]!r} is the name of a file of a base")


def _step_problems(manifest: Manifest) -> Iterator[Problem]:
    own = manifest.step
    for step in {kind.step for kind in manifest.tensors.kinds} - {None}:
        if own is None:
            yield Problem(MANIFEST, f"it has tensors of step {step}, and no step itself")
        elif step is not None and step >= own:
            yield Problem(MANIFEST, f"it is of step {own}, and has tensors of step {step} as older")
    if manifest.window is not None and manifest.window.at >= manifest.window.steps:
        yield Problem(MANIFEST, "its place in a window is beyond the window's end")
    layers = {} if manifest.experts is None else manifest.experts.layers
    for name, layer in layers.items():
        if not len(layer.seen) == len(layer.held) == len(layer.stored):
            yield Problem(MANIFEST, f"it counts tokens of different numbers of experts of {name!r}")


def _delta_problems(manifest: Manifest) -> Iterator[Problem]:
    """Whether deltas lead to the step, and tensors have what the manifest tells of them."""
    deltas, table = manifest.deltas, manifest.tensors
    if deltas is None:
        return
    if not 0 <= deltas.last - deltas.first < MAX_BATCH or deltas.last != manifest.step:
        steps = f"{deltas.first} to {deltas.last}"
        yield Problem(MANIFEST, f"it is of step {manifest.step}, and has deltas of steps {steps}")
        return
    if deltas.since >= deltas.first:
        yield Problem(MANIFEST, f"its deltas begin with step {deltas.first}, after {deltas.since}")
    if deltas.after not in {doc.id for doc in manifest.bases}:
        yield Problem(MANIFEST, "the checkpoint before its deltas is none of its bases")
    for name, of_name in deltas.partial.items():
        ascending = sorted(set(of_name)) == list(of_name)
        if not of_name or not ascending or of_name[0] < deltas.first or of_name[-1] > deltas.last:
            yield Problem(MANIFEST, f"the steps of {name[:200]!r} are none of its deltas")
    is_stored = [is_delta(kind.state) for kind in table.kinds]
    for row in (row for row, kind in enumerate(table.kind) if is_stored[kind]):
        if not _is_delta_of(table[row], deltas, table):
            doc = table[row]
            yield Problem(MANIFEST, f"{doc.name[:200]} ({doc.state[:200]}) has other steps")


def _is_delta_of(doc: TensorDoc, deltas: DeltasDoc, table: TensorTable) -> bool:
    """Whether a tensor has what the manifest tells of the deltas of its name."""
    count, sparse = len(deltas.steps(doc.name)), deltas.sparse.get(doc.name)
    if doc.state == deltas.state:
        return sparse is None and doc.shape[:1] == (count,)
    part = doc.state.removeprefix(f"{deltas.state}.")
    if part == "check":
        return doc.name in deltas.checked and (len(doc.shape) < 2 or doc.shape[0] == 1)
    if sparse is None or part not in ("indices", "values") or len(sparse.counts) != count:
        return False
    other = {"indices": "values", "values": "indices"}[part]
    elements = doc.shape[1:] if part == "indices" else doc.shape[:1]
    has_other = table.row(doc.name, f"{deltas.state}.{other}") is not None
    return elements == (sum(sparse.counts),) and has_other


def sibling_name(url: str) -> str | None:
    """The name of a base that is in the same folder as the checkpoint; None if it is elsewhere."""
    name = unquote(url.removeprefix("../"), errors="surrogateescape")
    return name if sibling_url(name) == url else None


def sibling_url(name: str) -> str | None:
    """The url of a base with this name in the same folder; None if no checkpoint has such a name."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(".ucf-"):
        return None
    escaped = _ESCAPED.sub(lambda match: f"%{os.fsencode(match[0])[0]:02X}", name)
    return f"../{escaped}"


def _is_absolute(url: str) -> bool:
    is_place = url.startswith("/") or re.match("[A-Za-z][A-Za-z0-9+.-]*://[^/]", url) is not None
    return is_place and "\0" not in url and ".." not in unquote(url).split("/")


def _table_problems(
    table: TensorTable, bases: Sequence[BaseDoc], *, has_sidecar: bool
) -> Iterator[Problem]:
    wrong = {
        n: reason
        for n, kind in enumerate(table.kinds)
        if (reason := _kind_fault(kind, len(bases), has_sidecar=has_sidecar))
    }
    unused = wrong.keys() - set(table.kind) if wrong else ()
    yield from (Problem(MANIFEST, f"{wrong[n]} (kind number {n})") for n in unused)
    faults: dict[int, str] = {}
    arrays = {n for n, kind in enumerate(table.kinds) if kind.path is not None}
    if arrays and (not table.digest or None in table.digest):
        listed = zip(table.kind, table.digest or repeat(None), strict=False)
        rows = (
            row for row, (kind, digest) in enumerate(listed) if digest is None and kind in arrays
        )
        faults = dict.fromkeys(rows, "the manifest gives it no digest")
    referenced = {n for n, kind in enumerate(table.kinds) if kind.is_referenced}
    if referenced:
        listed = zip(table.kind, table.fingerprint or repeat(None), strict=False)
        faults |= {
            row: "the manifest gives it no fingerprint, though it is in another checkpoint"
            for row, (kind, fingerprint) in enumerate(listed)
            if fingerprint is None and kind in referenced
        }
    if wrong:
        faults |= {row: wrong[kind] for row, kind in enumerate(table.kind) if kind in wrong}
    faults |= dict.fromkeys(table.repeated(), "the manifest lists it twice")
    for row, reason in sorted(faults.items()):
        yield Problem(
            MANIFEST, reason, table.names[table.name[row]], table.kinds[table.kind[row]].state
        )


def _kind_fault(kind: KindDoc, bases: int, *, has_sidecar: bool) -> str | None:
    """What is wrong with all tensors of a kind; None if nothing is."""
    shape, chunk, shard = kind.shape, kind.chunk, kind.shard
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_EDGE:
        return "the manifest gives it an invalid shape"
    if kind.base is not None and (kind.base >= bases or kind.path is not None):
        return "the manifest gives it an impossible base"
    if (kind.codec == BLOSC and kind.path is None) or (kind.codec == TILES and kind.path):
        return f"the manifest gives it the codec {kind.codec}, which its form does not have"
    if kind.path is None:
        stored = has_sidecar or kind.is_referenced
        return None if stored else "the manifest gives it no path, and there is no sidecar"
    if len(shape) > MAX_ARRAY_DIMS:
        return f"the manifest gives it an array of {len(shape)} dims; it may have {MAX_ARRAY_DIMS}"
    if chunk is None or shard is None or not len(shape) == len(chunk) == len(shard):
        return "the manifest gives it an invalid chunk grid"
    if shard != chunk and any(s % c for s, c in zip(shard, chunk, strict=True)):
        return "the manifest gives it an invalid chunk grid"
    if kind.codec == BLOSC and math.prod(chunk) * kind.unit > MAX_BLOSC:
        return "the manifest gives it chunks of more bytes than its codec encodes"
    if kind.nbytes <= MAX_SHARDS:  # of at least a byte each
        return None
    count = Grid(shape, chunk, shard, kind.unit).count
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
    scheme, _, location = root.rpartition("://")
    location = location.removeprefix("localhost") if scheme else location
    return f"{scheme.lower() or 'file'}://{posixpath.normpath(f'{unquote(location)}/{key}')}"


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


def _source_problems(doc: SidecarDoc) -> Iterator[Problem]:
    paths = set()
    for source in doc.sources:
        if _below_root(source.path, doc.roots) is None:
            yield Problem(
                MANIFEST,
                f"the source {source.path[:200]!r} is not below a root that the manifest lists",
            )
        elif source.path in paths:
            yield Problem(MANIFEST, f"the source {source.path[:200]!r} is listed twice")
        paths.add(source.path)
