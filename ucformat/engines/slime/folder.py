"""The folders of weight versions, and the documents of a delta.

A trainer publishes each version as a folder `weight_v000012`. One whose index has
`delta_encoding` in its metadata is a delta: its tensors are the compressed changes since the
version before, and the `__metadata__` of each of its files has the digest of each tensor as it is
after the change. Any other one is an ordinary Hugging Face checkpoint. Version 0 is the checkpoint
with which the receivers began, and is usually elsewhere.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.engines.slime.patches import check_supported, is_digest
from ucformat.errors import (
    IntegrityError,
    MissingData,
    UcformatError,
    UsageError,
    first_names,
    option_text,
)
from ucformat.sources.model_files import read_json, root_files
from ucformat.sources.safetensors import read_header
from ucformat.storage.base import check_key, exists
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.sources.safetensors import Header
    from ucformat.storage.base import Store

SUFFIX = ".safetensors"
ENDING = ".safetensors.index.json"  # of the index of a model
INDEX = f"model{ENDING}"

_FOLDER = re.compile(r"weight_v(\d{6,18})")
_NUMBER = re.compile(r"\d{1,18}")
_DECLARED = "delta_encoding"
_HEAD = 4 << 10  # bytes of an index, at the beginning of which writers put its metadata
_MAX_NAMED = 10


class Patch(NamedTuple):
    """The compressed change of a tensor: where it is stored, and the digest of the changed tensor."""

    file: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of one version, by the names of the tensors; `files` are keys of the store of all versions."""

    folder: str
    encoding: str
    checksum: str
    patches: dict[str, Patch]
    files: tuple[str, ...]


def folder_of(version: int) -> str:
    """The name of a version's folder."""
    return f"weight_v{version:06d}"


def number_of(folder: str) -> int | None:
    """The version whose folder has this name; None if it is not that of a version."""
    match = _FOLDER.fullmatch(folder)
    number = int(match[1]) if match else None
    return number if number is not None and folder_of(number) == folder else None


def is_weights(key: str) -> bool:
    """Whether a file of a version's folder is one of safetensors, or their index."""
    return "/" not in key and (key == INDEX or key.endswith(SUFFIX))


def is_delta(store: Store) -> bool:
    """Whether a folder is that of a delta, by its index, or by its files if its name is that of a version."""
    if exists(store, INDEX):
        head = store.read(INDEX, 0, min(store.info(INDEX).size, _HEAD))
        if f'"{_DECLARED}"'.encode() in head and _declares(store):
            return True
    if number_of(_name(store)) is None:
        return False
    first = next((key for key in root_files(store) if is_weights(key) and key != INDEX), "")
    try:
        return first != "" and _has_digests(read_header(store, first))
    except UcformatError:
        return False  # the source that opens it says what is wrong


def _declares(store: Store) -> bool:
    """Whether an index says that it is a delta's, or is damaged."""
    try:
        return _DECLARED in _index_metadata(read_json(store, INDEX))
    except IntegrityError:
        return True


def _index_metadata(index: Any) -> dict[str, Any]:
    metadata = index.get("metadata") if isinstance(index, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _has_digests(header: Header) -> bool:
    """Whether a file has a digest for each of its tensors, as only those of deltas do."""
    return bool(header.tensors) and all(
        is_digest(header.metadata.get(name)) for name in header.tensors
    )


def has_versions(store: Store) -> bool:
    """Whether a folder holds those of versions, and is no model itself."""
    keys = root_files(store)
    return bool(_versions(keys)) and not any(map(is_weights, keys))


def _versions(keys: Iterable[str]) -> list[int]:
    """The versions that have any weights, sorted: a folder without them is about to be written."""
    folders = {key.partition("/")[0] for key in keys if is_weights(key.partition("/")[2])}
    return sorted(n for n in map(number_of, folders) if n is not None)


def _name(store: Store) -> str:
    return store.url.rstrip("/").rpartition("/")[2]


def find_version(store: Store, wanted: int | None) -> tuple[Store, int]:
    """The folder of all versions, and the version to open.

    Args:
        store: of that folder, or that of a delta.
        wanted: the number of the version; None: the newest, or that of the delta.
    """
    if has_versions(store):
        versions = _versions(info.key for info in store.list())
        if wanted is not None and wanted not in versions:
            raise UsageError(
                f"{store.url} has no version {wanted}",
                hint=f"it has {first_names(reversed(versions), _MAX_NAMED)}",
            )
        return store, versions[-1] if wanted is None else wanted
    number, above = number_of(_name(store)), store.url.rstrip("/").rpartition("/")[0] or "/"
    if number is None or above.endswith(":/"):
        raise MissingData(
            f"{store.url} is a delta, and the version that it changes cannot be found by the name of this folder",
            hint="name the folder as its trainer did, such as weight_v000012, beside the folders of the "
            "versions before it",
        )
    if wanted not in (None, number):
        raise UsageError(
            f"{store.url} is version {number}, not {wanted}",
            hint=f"leave out the option `version`, or open {above}",
        )
    return open_store(above), number


def read_delta(store: Store, version: int) -> Delta | None:
    """Read the index and headers of a version; None if it is a full one.

    Args:
        store: of the folder of all versions.

    Raises:
        IntegrityError: its documents contradict each other, or it does not change the version
            before.
    """
    folder = folder_of(version)
    inside = PrefixStore(store, folder)
    stored = sorted(info.key for info in inside.list() if is_weights(info.key))
    shards = [key for key in stored if key != INDEX]
    if not stored:
        raise MissingData(
            f"{store.url}/{folder} is missing, which later versions change",
            hint="restore it; or open a version before it, or from the next full one on: "
            f"{option_text('version', str(version - 1))}",
        )
    index = read_json(inside, INDEX) if INDEX in stored else {}
    metadata = _index_metadata(index)
    if _DECLARED not in metadata:
        if shards and _has_digests(read_header(inside, shards[0])):
            raise MissingData(
                f"{inside.url} has the files of a delta, and no index that describes it",
                hint="it is still being written: wait; or its index was lost: restore it, or open the version "
                f"before: {option_text('version', str(version - 1))}",
            )
        return None
    _check_links(metadata, version, inside.url)
    encoding, checksum = check_supported(metadata, f"{inside.url}/{INDEX}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and is_weights(check_key(file)) for file in weight_map.values()
    ):
        raise IntegrityError(f"{inside.url}/{INDEX} has no `weight_map` from tensors to files")
    if lost := sorted(set(weight_map.values()) - set(shards)):
        raise MissingData(
            f"{inside.url} lacks {first_names(lost, _MAX_NAMED)}, which its index names",
            hint="copy all files of the version; each has other tensors",
        )
    patches: dict[str, Patch] = {}
    for header in map_io(lambda key: read_header(inside, key), shards):
        patches |= _patches(header, weight_map, checksum, folder, inside.url)
    if absent := sorted(weight_map.keys() - patches.keys()):
        raise IntegrityError(
            f"{inside.url} has no {first_names(map(reprlib.repr, absent), _MAX_NAMED)}, which its index names"
        )
    files = (f"{folder}/{INDEX}", *(f"{folder}/{key}" for key in shards))
    return Delta(folder, encoding, checksum, patches, files)


def _check_links(metadata: dict[str, Any], version: int, url: str) -> None:
    """Check that a delta is that of its folder, and changes the version before."""
    for member, expected in (("version", version), ("base_version", version - 1)):
        text = str(metadata.get(member))
        if not _NUMBER.fullmatch(text) or int(text) != expected:
            raise IntegrityError(
                f"{url}/{INDEX} has the {member} {reprlib.repr(metadata.get(member))} instead of {expected}",
                hint="a version changes the one before it: the folder was renamed, or is another run's",
            )


def _patches(
    header: Header, weight_map: dict[str, str], checksum: str, folder: str, url: str
) -> dict[str, Patch]:
    """The patches in a file, after a check that they are those which the index lists in it."""
    file = header.file
    patches = {}
    for name in (*header.tensors, *header.unreadable):
        shown = f"{url}/{file}: {reprlib.repr(name)}"
        if weight_map.get(name) != file:
            raise IntegrityError(
                f"{shown} is not in this file according to {INDEX}",
                hint="files of different versions are mixed in one folder",
            )
        info = header.tensors.get(name)
        if info is None or info.dtype != "uint8" or len(info.shape) != 1:
            raise IntegrityError(f"{shown} is not a row of bytes, as a compressed change is")
        digest = header.metadata.get(name)
        if not is_digest(digest, checksum):
            raise IntegrityError(f"{shown} has no {checksum} digest in the header of its file")
        patches[name] = Patch(f"{folder}/{file}", header.starts[name], info.nbytes, str(digest))
    return patches
