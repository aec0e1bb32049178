"""What of a place is an attempt's own: with an attempt goes this, and nothing else (docs/security.md, rule 5).

Records, tombstones and manifests may have been written by anybody. So their names are believed only where they lead to
folders that no program but a writer of this format makes, and these go only if nothing in them is another's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from ucformat.errors import NotFound, Refused
from ucformat.schema.documents import CATALOG_DOCUMENT, TOMBSTONE
from ucformat.schema.manifest import ATTEMPT, MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = [
    "FOLDERS",
    "KINDS",
    "attempt_of",
    "folders_of",
    "is_inside_attempt",
    "names_below",
    "record_key",
    "refuse_others",
]

#: The folders that a writer makes below a checkpoint's root, besides those for each attempt in the first three.
FOLDERS = (*(KINDS := ("data", "objects", "assets")), "attempts")

_NAME = re.compile(ATTEMPT)
_INSIDE = re.compile(rf"(^|/)({'|'.join(KINDS)})/{ATTEMPT}(/|$)")
_MARKS = (MANIFEST, TOMBSTONE, CATALOG_DOCUMENT)


class _Head(BaseModel):
    """What every document of ours begins with."""

    format: str


def record_key(attempt: str) -> str:
    """Where the record of an attempt lies."""
    _check(attempt)
    return f"attempts/{attempt}.json"


def folders_of(attempt: str) -> tuple[str, ...]:
    """Where an attempt keeps its files.

    Raises:
        Refused: no attempt has this name, so that the folders may be anybody's.
    """
    _check(attempt)
    return tuple(f"{kind}/{attempt}" for kind in KINDS)


def attempt_of(key: str) -> str | None:
    """Whose record a file is that lies in `attempts`; None if it is none."""
    name = key.rpartition("/")[2].removesuffix(".json")
    return name if key.endswith(".json") and _NAME.fullmatch(name) else None


def _check(attempt: str) -> None:
    if not _NAME.fullmatch(attempt):
        raise Refused(
            f"{attempt!r} is not the name of an attempt: that is 20 digits of 0-9 and a-f",
            hint="the checkpoint was damaged or made to do harm; nothing was removed or written",
        )


def is_inside_attempt(folder: str) -> bool:
    """Whether a folder lies in one of an attempt, where what looks like a place is a file of that."""
    return _INSIDE.search(folder) is not None


def refuse_others(store: Store, attempt: str, standing: Manifest | None) -> None:
    """Refused where something in an attempt's folders is not its own.

    Another checkpoint may lie in them, or an attempt at one, or what a catalog knows of one; and the checkpoint that
    stands at the place, whoever wrote it, may lie in the folders of another attempt than its manifest says.

    Args:
        store: the place.
        attempt: whose folders are looked through.
        standing: the manifest of what stands at the place.

    Raises:
        Refused: it says which folder, and what is in it.
    """
    folders = folders_of(attempt)
    if standing is not None:
        for folder in folders:
            if standing.attempt == attempt or names_below(store, standing, folder):
                raise _refused(store, folder, f"the checkpoint {standing.id}, which stands there, needs it")
    for folder in folders:
        for info in store.list(folder):
            if _is_mark(info.key) and _is_ours(store, info.key):
                raise _refused(store, folder, f"{info.key} shows that another's checkpoint lies in it")


def _refused(store: Store, folder: str, why: str) -> Refused:
    return Refused(
        f"{store.url}/{folder} is not removed: {why}",
        hint="look at it; what really may go is to be deleted by hand",
    )


def _is_mark(key: str) -> bool:
    *folders, name = key.split("/")
    return name in _MARKS or (folders[-1:] == ["attempts"] and attempt_of(name) is not None)


def _is_ours(store: Store, key: str) -> bool:
    """Whether this is a document of this format, and no asset that is called so."""
    try:
        return _Head.model_validate_json(store.read(key)).format.startswith("ucformat")
    except (NotFound, ValidationError):
        return False


def names_below(store: Store, manifest: Manifest, folder: str) -> bool:
    """Whether a checkpoint has files below a folder, or an array around it.

    Args:
        store: the checkpoint's place.
        manifest: the checkpoint's.
        folder: the folder's key in the place.
    """
    return any(f"{path}/".startswith(f"{folder}/") or folder.startswith(f"{path}/") for path in _paths(store, manifest))


def _paths(store: Store, manifest: Manifest) -> Iterable[str]:
    """The files and folders of arrays that a manifest, or its sidecar, names."""
    yield from (tensor.path for tensor in manifest.tensors if tensor.path is not None)
    yield from (doc.path for doc in (manifest.objects, *manifest.assets.values()) if doc is not None)
    if manifest.sidecar is not None:
        from ucformat.format.sidecar import decode

        path = manifest.sidecar.path
        yield path
        yield from decode(store.read(path), [len(t.shape) for t in manifest.tensors], f"{store.url}/{path}").files
