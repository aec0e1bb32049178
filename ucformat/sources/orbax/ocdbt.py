"""OCDBT, TensorStore's key-value store: where in its files each value lies.

`manifest.ocdbt` names the root of a B+tree whose nodes lie in data files; a leaf holds small values itself, and says of
others in which file and where they are, as they were written. TensorStore decodes nodes out of memory, each after its
bytes were read through our own store: so any store serves, and values are read in place.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ucformat.errors import IntegrityError, MissingData, Refused
from ucformat.sources.orbax.folder import MANIFEST
from ucformat.sources.orbax.nodes import check_manifest, check_node
from ucformat.sources.zarr.decode import tensorstore
from ucformat.sources.zarr.values import Stored
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.sources.zarr.values import Values
    from ucformat.storage.base import Store

__all__ = ["read_ocdbt"]

_MOST_MANIFEST = 64 << 20  # bytes
_MOST_NODE = 256 << 20  # bytes; Orbax lets nodes of 100 MB be
_MOST_NODES = 1 << 20
_FAILURES = (ValueError, TypeError, RuntimeError, OverflowError, KeyError, NotImplementedError)


def read_ocdbt(store: Store, folder: str, sizes: Mapping[str, int]) -> Values:
    """Every value of the newest version, by its key; `sizes` are those of the store's files.

    Raises:
        IntegrityError: a node is damaged, or speaks of bytes that are not there.
        MissingData: a data file is not there.
    """
    prefix = f"{folder}/" if folder else ""
    key = prefix + MANIFEST
    if sizes[key] > _MOST_MANIFEST:
        raise Refused(f"{store.url}/{key} has {sizes[key]} bytes, too many for a manifest")
    data = store.read(key)
    check_manifest(data, f"{store.url}/{key}")
    manifest = _dump(store, key, MANIFEST, data, None)
    if manifest.get("config", {}).get("manifest_kind", "single") != "single":
        raise Refused(f"{store.url}/{key} is one of numbered manifests, which are not read")
    versions = manifest.get("versions") or []
    if not versions:
        raise IntegrityError(f"{store.url}/{key} holds no version")
    newest = max(versions, key=lambda v: v["generation_number"])
    return _walk(store, prefix, newest, sizes)


def _walk(store: Store, prefix: str, version: dict[str, Any], sizes: Mapping[str, int]) -> Values:
    values: Values = {}
    todo = deque([(version["root"].get("location"), version["root_height"], b"")])
    seen: set[tuple[str, int]] = set()  # places in files: what is said of them has many spellings
    while todo:
        location, height, stem = todo.popleft()
        if location is None:  # of an empty tree
            continue
        held = _locate(store, prefix, location, "btreenode", sizes)
        if (held.file, held.offset) in seen or len(seen) >= _MOST_NODES:
            raise IntegrityError(f"{store.url}: its OCDBT tree comes back to the node {location}, or does not end")
        seen.add((held.file, held.offset))
        if held.nbytes > _MOST_NODE:
            raise Refused(f"{store.url}: the OCDBT node {location} has {held.nbytes} bytes, too many")
        data = held.read(store)
        check_node(data, len(stem), f"{store.url}: the OCDBT node {location[:200]}")
        node = _dump(store, held.file, "node", data, f"btreenode::node:0:{held.nbytes}")
        if node["height"] != height:
            raise IntegrityError(f"{store.url}: the OCDBT node {location} is not of the height {height}")
        for entry in node["entries"]:
            name = stem + entry["key"]
            if "location" in entry:
                todo.append((entry["location"], height - 1, stem + entry["subtree_common_prefix"]))
            elif "inline_value" in entry:
                data = entry["inline_value"]
                values[_text(name)] = Stored(held.file, held.offset, len(data), data)
            else:
                values[_text(name)] = _locate(store, prefix, entry["indirect_value"], "value", sizes)
    return values


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _locate(store: Store, prefix: str, location: str, kind: str, sizes: Mapping[str, int]) -> Stored:
    """The range of a file that `<kind>:<base>:<path>:<offset>:<length>` means."""
    parts = location.split(":")
    if len(parts) != 5 or parts[0] != kind or not parts[3].isdecimal() or not parts[4].isdecimal():
        raise IntegrityError(f"{store.url}: {location[:200]!r} is no place of a {kind} in OCDBT")
    file = check_key(prefix + unquote(parts[1]) + unquote(parts[2]))
    offset, nbytes = int(parts[3]), int(parts[4])
    if file not in sizes:
        raise MissingData(f"{store.url}/{file} is missing: values of the checkpoint lie in it")
    if offset + nbytes > sizes[file]:
        raise MissingData(
            f"{store.url}/{file} has {sizes[file]} bytes, but values of the checkpoint reach to byte {offset + nbytes}",
            hint="the file is truncated: restore it from another copy",
        )
    return Stored(file, offset, nbytes)


def _dump(store: Store, file: str, name: str, data: bytes, node: str | None) -> dict[str, Any]:
    """What a manifest or a node says, decoded from its bytes."""
    ts = tensorstore()
    context = ts.Context()
    try:
        base = ts.KvStore.open("memory://", context=context).result()
        base.write(name, data).result()
        found: dict[str, Any] = ts.ocdbt.dump(base, node, context=context).result()
    except _FAILURES as error:
        reason = str(error).partition(" [")[0][:300]
        raise IntegrityError(f"{store.url}/{file} is damaged: {reason}") from None
    return found
