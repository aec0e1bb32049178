"""Zarr groups and arrays, version 2 and 3, read in place."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError, option_text
from ucformat.geometry.tensor import Key, Roster, TensorInfo
from ucformat.reading.readable import Facts
from ucformat.sources.contents import unknown_tensor
from ucformat.sources.decoded import DecodedStore
from ucformat.sources.values import to_json
from ucformat.sources.zarr.chunks import Chunks
from ucformat.sources.zarr.hierarchy import Hierarchy, read_hierarchy
from ucformat.sources.zarr.values import list_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import Record
    from ucformat.storage.base import Store

__all__ = ["OpenZarr"]


def _hint() -> str:
    return (
        "a file was lost; or it holds nothing but the fill value, which zarr-python by default does not write: if you "
        f"know that, say so: {option_text('fill_missing')}, or write anew with `write_empty_chunks`"
    )


class OpenZarr:
    """One opened Zarr group, or array."""

    kind = "zarr"

    def __init__(self, store: Store, *, fill_missing: bool) -> None:
        values = list_values(store)
        found = read_hierarchy(store, values)
        self._chunks = Chunks(store, values, found.arrays, found.arrays if fill_missing else (), _hint())
        self.store: Store = DecodedStore(store, self._chunks)
        keys = _keys(found, store.url)
        self._arrays = {keys[path]: array for path, array in found.arrays.items()}
        self.facts = Facts(
            roster=Roster(tuple(TensorInfo(*k, a.dtype, a.shape) for k, a in self._arrays.items())),
            objects={"attributes": to_json(found.attributes)} if found.attributes else {},
            layout={"zarr_format": found.version},
            engine={"name": "zarr", "version": str(found.version)},
            files=tuple(v.file for v in values.values()),
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the chunks of an array lie; reads the indexes of its shards."""
        if key not in self._arrays:
            raise unknown_tensor(key, self._arrays, self.store.url)
        return self._chunks.extents(self._arrays[key], within)

    def records(self) -> Iterator[Record]:
        """None: the checksums of Zarr stand beside its chunks."""
        yield from ()


def _keys(found: Hierarchy, url: str) -> dict[str, Key]:
    """The tensor that each array is.

    The arrays of a universal checkpoint say it. Others are weights, named by their path, with dots for slashes unless
    that gives two arrays one name; an array that is opened by itself is named as its folder.
    """
    said = {path: _said(found.attributes.get(path, {}).get("ucformat")) for path in found.arrays}
    keys = {path: key for path, key in said.items() if key is not None}
    if len(keys) < len(said):
        if set(found.arrays) == {""}:
            name = url.rstrip("/").rpartition("/")[2].removesuffix(".zarr")
            return {"": Key(name or "array", "weight")}
        dotted = {path.replace("/", ".") for path in found.arrays}
        plain = len(dotted) < len(found.arrays)
        keys = {path: Key(path if plain else path.replace("/", "."), "weight") for path in found.arrays}
    twice = [key for key, n in Counter(keys.values()).items() if n > 1]
    if twice:
        raise UsageError(f"{url}: two arrays say in their attributes that they are {twice[0]}", hint="remove one")
    return keys


def _said(attribute: Any) -> Key | None:
    if isinstance(attribute, dict):
        name, state = attribute.get("name"), attribute.get("state")
        if isinstance(name, str) and isinstance(state, str):
            return Key(name, state)
    return None
