"""What a manifest must not say, and with `format.extents` a sidecar: by this readers refuse, and `verify` names.

No file is read here. Readers refuse a manifest when they open it, and extents when they first need them; whether
extents cover a tensor they prove for what they read, and `verify` for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import Inconsistent
from ucformat.format.arrays import MAX_DIMS, MAX_SHARDS
from ucformat.format.chunking import Grid
from ucformat.format.commit import MANIFEST
from ucformat.geometry.tensor import Key
from ucformat.schema.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.schema.manifest import Manifest, SidecarDoc, TensorDoc

__all__ = ["MAX_EDGE", "MOUNT", "Problem", "manifest_problems", "refuse"]

#: How the paths of files begin that lie in other checkpoints.
MOUNT = "roots/"

#: The longest edge of a tensor: what offsets can say.
MAX_EDGE = 1 << 62

_MAX_DIMS = 64  # torch's own limit
_NAMED = 5  # problems of one kind of thing that an error names


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; `chunk` are a damaged chunk's coordinates in the tensor's chunk grid."""

    file: str
    reason: str
    name: str | None = None
    state: str | None = None
    chunk: tuple[int, ...] | None = None

    def __str__(self) -> str:
        tensor = "" if self.name is None else f"{self.name} ({self.state})"
        chunk = "" if self.chunk is None else f" chunk {list(self.chunk)}"
        return f"{tensor}{chunk}{': ' if tensor else ''}{self.reason} [{self.file}]"


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
