"""Zarr groups and arrays, version 2 and 3, read in place."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucformat.engines.orbax.zarr_array import ZarrArray, is_file_of, parse_v2, parse_v3
from ucformat.engines.orbax.zarr_chunks import Chunks, OpenArrays
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, UsageError, option_text
from ucformat.geometry.tensor import Key, TensorList
from ucformat.reading.readable import CheckpointMetadata
from ucformat.reading.values import to_json
from ucformat.storage.concurrency import map_io
from ucformat.storage.decoded import DecodedStore, list_values, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ucformat.storage.base import Store
    from ucformat.storage.decoded import Value

_V3 = "zarr.json"
_V2 = (".zgroup", ".zarray", ".zmetadata")
_DOCUMENTS = frozenset({*_V2, ".zattrs", _V3})
_CHUNK = re.compile(r"c|(c\.)?\d+(\.\d+)*")  # the names of chunks' files


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """The arrays by path, in the order of paths, and the attributes of nodes."""

    version: int
    arrays: dict[str, ZarrArray] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # by path: why an array cannot be read
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, path: str, parse: Callable[[str, str, Any], ZarrArray], where: str, doc: Any
    ) -> None:
        """Add an array, or why it cannot be read."""
        try:
            self.arrays[path] = parse(path, where, doc)
        except UnsupportedError as error:
            self.unreadable[path] = f"is not read: {error.message}"

    @property
    def paths(self) -> list[str]:
        """The paths of all arrays."""
        return [*self.arrays, *self.unreadable]


def _read_hierarchy(store: Store, values: Mapping[str, Value]) -> _Hierarchy:
    """Read every metadata document.

    Consolidated metadata are not used, because an array's own may be newer; but every array that
    they name must exist.
    """
    keys = [key for key in values if key.rpartition("/")[2] in _DOCUMENTS]
    documents = dict(
        zip(keys, map_io(lambda key: read_json(store, values, key), keys), strict=True)
    )
    out = _Hierarchy(3 if _V3 in documents else 2)
    for key in documents:
        if key.rpartition("/")[2] == _V3:
            _check_version(store, documents, key.rpartition("/")[0])
    for key, doc in documents.items():
        path, _, name = key.rpartition("/")
        if name == _V3:
            _add_v3(out, path, f"{store.url}: {key}", doc)
        elif name == ".zarray":
            out.add(path, parse_v2, f"{store.url}: {key}", doc)
        elif name == ".zattrs" and doc:
            out.attributes[path] = _attributes(f"{store.url}: {key}", doc)
    _check_nesting(store, values, out)
    _check_consolidated(store, documents, out)
    return out


def _check_nesting(store: Store, values: Mapping[str, Value], out: _Hierarchy) -> None:
    """Check that no array is inside another, and that every chunk is in an array."""
    for path in out.paths:
        if path and (outer := _outer_array(out, path.rpartition("/")[0])) is not None:
            raise IntegrityError(f"{store.url}: the array {path} is inside the array {outer!r}")
    for key in values:
        if (
            _CHUNK.fullmatch(key.rpartition("/")[2])
            and _outer_array(out, key.rpartition("/")[0]) is None
        ):
            raise MissingData(
                f"{store.url}: {key} seems to be a chunk, but of an array whose metadata are "
                "missing",
                hint=(
                    "restore the array's metadata from another copy; or move the file, if it is "
                    "not a chunk"
                ),
            )


def _check_consolidated(store: Store, documents: dict[str, Any], out: _Hierarchy) -> None:
    """Check that the consolidated metadata, if there are any, agree with the arrays' own."""
    for path, parse in _consolidated(store, documents):
        if path in out.unreadable:
            continue
        if path not in out.arrays:
            raise MissingData(
                f"{store.url}: the consolidated metadata name the array {path}, which does not "
                "exist",
                hint=(
                    "copy all of the folder; or, if the array was deleted on purpose, "
                    "consolidate the metadata anew"
                ),
            )
        if repr(parse()) != repr(out.arrays[path]):  # a fill value of NaN does not equal itself
            raise IntegrityError(
                f"{store.url}: the consolidated metadata of {path} differ from its own",
                hint="consolidate the metadata anew, if the array's own are right",
            )


def _outer_array(out: _Hierarchy, folder: str) -> str | None:
    """The array that this folder is, or is in."""
    paths = set(out.paths)
    if "" in paths:
        return ""
    while folder:
        if folder in paths:
            return folder
        folder = folder.rpartition("/")[0]
    return None


def _add_v3(out: _Hierarchy, path: str, where: str, doc: Any) -> None:
    if (
        not isinstance(doc, dict)
        or doc.get("zarr_format") != 3
        or doc.get("node_type") not in ("group", "array")
    ):
        raise IntegrityError(f"{where} is not the metadata of a Zarr v3 group or array")
    if doc["node_type"] == "array":
        out.add(path, parse_v3, where, doc)
    if doc.get("attributes"):
        out.attributes[path] = _attributes(where, doc["attributes"])


def _attributes(where: str, attributes: Any) -> dict[str, Any]:
    if not isinstance(attributes, dict):
        raise IntegrityError(f"{where}: its attributes are not an object")
    return attributes


def _check_version(store: Store, documents: dict[str, Any], path: str) -> None:
    for name in _V2:
        v2_key = f"{path}/{name}" if path else name
        if v2_key in documents:
            raise UnsupportedError(
                f"{store.url}: {path or 'the folder'} is a node of Zarr v3 and of v2: it has "
                f"{_V3} and {name}",
                hint="move the metadata of the version that you do not want elsewhere",
            )


def _consolidated(
    store: Store, documents: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], ZarrArray]]]:
    """The arrays in the root's consolidated metadata, and what parses each."""
    v2, v3 = documents.get(".zmetadata"), documents.get(_V3)
    where = f"{store.url}: the consolidated metadata"
    if v2 is not None:
        entries = v2.get("metadata") if isinstance(v2, dict) else None
        if not isinstance(entries, dict):
            raise IntegrityError(f"{where} are damaged: .zmetadata")
        for key, doc in entries.items():
            if key.rpartition("/")[2] == ".zarray":
                path = key.rpartition("/")[0]
                yield path, partial(parse_v2, path, where, doc)
    if isinstance(v3, dict) and (consolidated := v3.get("consolidated_metadata")):
        entries = consolidated.get("metadata") if isinstance(consolidated, dict) else None
        if not isinstance(entries, dict):
            raise IntegrityError(f"{where} are damaged: {_V3}")
        for path, doc in entries.items():
            if isinstance(doc, dict) and doc.get("node_type") == "array":
                yield path, partial(parse_v3, path, where, doc)


def _hint() -> str:
    return (
        "a file was lost; or the chunk contains only the fill value, and zarr-python by default "
        "does not write it: if "
        f"you know that, use {option_text('fill_missing')}, or write anew with `write_empty_chunks`"
    )


class OpenZarr(OpenArrays):
    """An opened Zarr group, or array."""

    kind = "zarr"

    def __init__(self, store: Store, *, fill_missing: bool) -> None:
        values = list_values(store)
        hierarchy = _read_hierarchy(store, values)
        chunks = Chunks(
            store, values, hierarchy.arrays, hierarchy.arrays if fill_missing else (), _hint()
        )
        self.store: Store = DecodedStore(store, chunks)
        keys = _keys(hierarchy, store.url)
        self._add(
            chunks,
            {keys[path]: array for path, array in hierarchy.arrays.items()},
            {keys[path]: why for path, why in hierarchy.unreadable.items()},
        )
        paths = set(hierarchy.paths)
        files = (k for k in values if k.rpartition("/")[2] in _DOCUMENTS or is_file_of(paths, k))
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(tuple(self.contents.infos.values())),
            objects={"attributes": to_json(hierarchy.attributes)} if hierarchy.attributes else {},
            layout={"zarr_format": hierarchy.version},
            engine={"name": "zarr", "version": str(hierarchy.version)},
            files=tuple(files),
            unreadable=self.contents.unreadable,
        )


def _keys(hierarchy: _Hierarchy, url: str) -> dict[str, Key]:
    """Decide which tensor each array is.

    The arrays of a universal checkpoint record it. Others are weights, named by their path, with
    dots for slashes unless that would give two arrays the same name; a single array is named like
    its folder.
    """
    recorded = {
        path: _recorded_key(hierarchy.attributes.get(path, {}).get("ucformat"))
        for path in hierarchy.paths
    }
    keys = {path: key for path, key in recorded.items() if key is not None}
    if len(keys) < len(recorded):
        if set(hierarchy.paths) == {""}:
            name = url.rstrip("/").rpartition("/")[2].removesuffix(".zarr")
            return {"": Key(name or "array", "weight")}
        dotted = {path.replace("/", ".") for path in hierarchy.paths}
        with_slashes = len(dotted) < len(hierarchy.paths)
        keys = {
            path: Key(path if with_slashes else path.replace("/", "."), "weight")
            for path in hierarchy.paths
        }
    twice = [key for key, n in Counter(keys.values()).items() if n > 1]
    if twice:
        raise UsageError(
            f"{url}: two arrays are {twice[0]} according to their attributes", hint="remove one"
        )
    return keys


def _recorded_key(attribute: Any) -> Key | None:
    if isinstance(attribute, dict):
        name, state = attribute.get("name"), attribute.get("state")
        if isinstance(name, str) and isinstance(state, str):
            return Key(name, state)
    return None
