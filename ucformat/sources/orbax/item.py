"""One tree of an Orbax checkpoint: its leaves, and the arrays that hold them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData
from ucformat.sources.orbax.folder import MANIFEST, TREE
from ucformat.sources.orbax.ocdbt import read_ocdbt
from ucformat.sources.orbax.tree import Leaf, parse_tree
from ucformat.sources.pickle.stand_ins import NdArray
from ucformat.sources.values import to_json
from ucformat.sources.zarr.array import Array, parse_v2, parse_v3
from ucformat.sources.zarr.values import Stored, Values, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.storage.base import Store

__all__ = ["Item", "scalar_json"]

_ALONE = ("checkpoint",)  # the path of an array that is an item of its own, which it gives the name
_STRINGS = "_strings.json"
_METADATA = {".zarray": parse_v2, "zarr.json": parse_v3}
_PLAIN = {"bool": "?", "int64": "<q", "float64": "<d"}  # what Python's own numbers are stored as


class Item:
    """An item's leaves by their path in the checkpoint, which begins with the item's name where there are several.

    `arrays` and `values` are by the paths and keys of the folder that the item lies in.
    """

    def __init__(self, store: Store, name: str, folder: str, sizes: Mapping[str, int]) -> None:
        self._store, self._folder = store, folder
        self._below = f"{folder}/" if folder else ""
        self._files = {k: Stored(k, 0, n) for k, n in sizes.items() if k.startswith(self._below)}
        where = f"{store.url}: {self._below}{TREE}"
        doc = read_json(store, self._files, self._below + TREE)
        self.tree = parse_tree(where, doc)
        self.ocdbt = self._below + MANIFEST in sizes
        if doc.get("use_ocdbt") is True and not self.ocdbt:
            raise MissingData(
                f"{store.url}/{self._below}{MANIFEST} is missing, and the arrays of the checkpoint are in OCDBT",
                hint="the save did not end, or the file was lost: restore it from another copy",
            )
        self.values: Values = self._files
        if self.ocdbt:
            self.values = {self._below + k: v for k, v in read_ocdbt(store, folder, sizes).items()}
        first = tuple(part for part in name.split(".") if part)
        self._paths = {leaf: first if first and leaf.path == _ALONE else first + leaf.path for leaf in self._leaves()}
        self.arrays = {self._paths[leaf]: self._array(leaf) for leaf in self.tree.arrays}
        self.scalars = {self._paths[leaf]: self._array(leaf) for leaf in self.tree.scalars}

    def _leaves(self) -> tuple[Leaf, ...]:
        return self.tree.arrays + self.tree.scalars + self.tree.strings

    def _array(self, leaf: Leaf) -> Array:
        """The array of a leaf, from its metadata."""
        path = self._below + leaf.name
        found = [name for name in _METADATA if f"{path}/{name}" in self.values]
        if self.tree.zarr3 is not None and len(found) > 1:
            found = ["zarr.json" if self.tree.zarr3 else ".zarray"]
        if len(found) != 1:
            raise MissingData(
                f"{self._store.url}: the array {leaf.name}, which {self._below}{TREE} names, "
                + ("is not stored" if not found else "is stored as Zarr v2 and as v3"),
                hint="files were lost, or belong to another save: restore the folder from another copy",
            )
        key = f"{path}/{found[0]}"
        return _METADATA[found[0]](path, f"{self._store.url}: {key}", read_json(self._store, self.values, key))

    def strings(self) -> dict[tuple[str, ...], str]:
        """The leaves that are text."""
        if not self.tree.strings:
            return {}
        key = self._below + _STRINGS
        if key not in self._files:
            raise MissingData(f"{self._store.url}/{key} is missing: it holds {self.tree.strings[0].name}")
        held = read_json(self._store, self._files, key)
        out = {}
        for leaf in self.tree.strings:
            value: Any = held
            for part in leaf.name.split("/"):  # the name is a JSON pointer
                value = value.get(part) if isinstance(value, dict) else None
            if not isinstance(value, str):
                raise MissingData(f"{self._store.url}/{key} does not hold the text {leaf.name}")
            out[self._paths[leaf]] = value
        return out

    def random_keys(self) -> dict[str, str]:
        """The arrays that are JAX's typed random keys, and of which implementation."""
        folder = f"{self._below}array_metadatas/"
        keys = sorted(k for k in self._files if k.startswith(folder))
        if not keys:
            return {}
        doc = read_json(self._store, self._files, keys[0])  # each process says the same of each array
        entries = doc.get("array_metadatas") if isinstance(doc, dict) else None
        by_name = {leaf.name: path for leaf, path in self._paths.items()}
        out = {}
        for entry in entries if isinstance(entries, list) else []:
            said = entry.get("array_metadata") if isinstance(entry, dict) else None
            more = said.get("ext_metadata") if isinstance(said, dict) else None
            if isinstance(said, dict) and isinstance(more, dict) and "random_key_impl" in more:
                name = str(said.get("param_name"))
                if name in by_name:
                    out[".".join(by_name[name])] = str(more["random_key_impl"])
        return out


def scalar_json(name: str, array: Array, data: bytes) -> Any:
    """A number that was a leaf of the tree, as an object: those of Python plainly, of other types with their type."""
    if array.shape:
        raise IntegrityError(f"{name} is said to be a number, but is an array of {list(array.shape)}")
    if array.dtype in _PLAIN:
        return to_json(struct.unpack(_PLAIN[array.dtype], data)[0])
    return to_json(NdArray(array.dtype, (), data, fortran=False))
