"""Orbax checkpoints, read in place: in OCDBT or in files, of Zarr v2 or v3."""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.engines.orbax.folder import CHECKPOINT, MANIFEST, TREE, Step
from ucformat.engines.orbax.ocdbt import read_ocdbt
from ucformat.engines.orbax.zarr_array import ZarrArray, is_file_of, parse_v2, parse_v3
from ucformat.engines.orbax.zarr_chunks import Chunks, OpenArrays
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import CheckpointMetadata, path_to_json
from ucformat.reading.stand_ins import NdArray
from ucformat.reading.trees import tensor_keys
from ucformat.reading.values import to_json
from ucformat.storage.base import ByteRange
from ucformat.storage.decoded import DecodedStore, read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ucformat.geometry.tensor import Extent, TensorInfo
    from ucformat.reading.readable import StatePath
    from ucformat.storage.base import Store
    from ucformat.storage.decoded import Value

_MISSING_HINT = "files were lost, or the save was incomplete: restore them from another copy"
_JSON = ("metadata", "metrics")  # the files of items that are JSON
_OWN = (CHECKPOINT, "commit_success.txt", "orbax.checkpoint")  # bookkeeping of Orbax


class OpenOrbax(OpenArrays):
    """An opened Orbax checkpoint."""

    kind = "orbax"
    part = ""  # `_METADATA` describes the arrays of all processes

    def __init__(self, store: Store, step: Step, *, fill_missing: bool | None) -> None:
        several = len(step.trees) > 1
        items = [
            Item(store, name if several else "", folder, step.sizes)
            for name, folder in step.trees.items()
        ]
        arrays = {path: array for item in items for path, array in item.arrays.items()}
        unreadable = {path: why for item in items for path, why in item.unreadable.items()}
        scalars = {path: array for item in items for path, array in item.scalars.items()}
        filled = [
            array.path
            for item in items
            for array in (*item.arrays.values(), *item.scalars.values())
            if (not item.tree.stores_fill if fill_missing is None else fill_missing)
        ]
        chunks = Chunks(
            store,
            {key: value for item in items for key, value in item.values.items()},
            {array.path: array for array in (*arrays.values(), *scalars.values())},
            filled,
            _MISSING_HINT,
        )
        self.store: Store = DecodedStore(store, chunks)
        keys = tensor_keys({path: array.shape for path, array in arrays.items()})
        keys |= {path: Key(".".join(path), "weight") for path in unreadable}
        for item in items:
            keys |= item.noted_keys()
        _check_names(store, keys.values())
        tensors = _in_order({keys[path]: array for path, array in arrays.items()})
        self._add(chunks, tensors, {keys[path]: why for path, why in unreadable.items()})
        numbers = {
            ".".join(p): scalar_json(".".join(p), a, self._read(a, chunks.extents(a)))
            for p, a in scalars.items()
        }
        texts = {".".join(p): text for item in items for p, text in item.strings().items()}
        objects: dict[str, Any] = {**numbers, **texts}
        if further := self._other_objects(step, items):
            objects["orbax"] = further
        files = {key for key in step.others if key.rpartition("/")[2] in (*_OWN, *_JSON)}
        files |= {key for item in items for key in item.files()}
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            objects=objects,
            paths={
                keys[path]: (state_path,)
                for i in items
                for path, state_path in i.array_paths()
                if path in arrays
            },
            unreadable=self.contents.unreadable,
            step=self._step(numbers, step),
            layout={
                "ocdbt": any(i.ocdbt for i in items),
                "zarr3": any(i.tree.zarr3 for i in items),
            },
            engine={"name": "orbax"},
            files=tuple(key for key in step.sizes if key in files),
            folder=step.folder,
        )

    def _read(self, array: ZarrArray | TensorInfo, extents: Iterator[Extent]) -> bytes:
        """The bytes of a 0-d array."""
        if array.shape:
            return b""
        extent = next(extents)
        return self.store.read(extent.file, extent.offset, array.itemsize)

    def _step(self, numbers: dict[str, Any], step: Step) -> int | None:
        """The leaf `step` at the root of a tree; otherwise the step in the folder's name."""
        for name in ("step", *(f"{tree}.step" for tree in step.trees)):
            if type(numbers.get(name)) is int:
                return int(numbers[name])
            key = Key(name, "weight")
            info = self.contents.infos.get(key)
            if info is not None and not info.shape and info.dtype.startswith(("int", "uint")):
                data = self._read(info, self.extents(key))
                return int.from_bytes(data, "little", signed=info.dtype.startswith("int"))
        return step.number

    def _other_objects(self, step: Step, items: list[Item]) -> dict[str, Any]:
        """The metadata of the checkpoint and of its trees, and the items that are JSON."""
        out: dict[str, Any] = {}
        below = f"{step.folder}/" if step.folder else ""
        files = {key: ByteRange(key, 0, n) for key, n in step.sizes.items()}
        if below + CHECKPOINT in files:
            document = read_json(self.store, files, below + CHECKPOINT)
            if isinstance(document, dict):
                self._check_items(below, document.get("item_handlers"), files)
                present = [k for k in ("metrics", "custom_metadata") if document.get(k)]
                out |= {k: to_json(document[k]) for k in present}
        notes = {n: _without_notes(i.tree.custom) for n, i in zip(step.trees, items, strict=True)}
        if custom := {name: user for name, user in notes.items() if user}:
            out["trees"] = to_json(custom)
        valueless = [(item.state_path(leaf), leaf.kind) for item in items for leaf in item.others()]
        if valueless:
            out["leaves"] = [[path_to_json(path), kind] for path, kind in valueless]
        if keys := {name: kind for item in items for name, kind in item.random_keys().items()}:
            out["random_keys"] = keys
        for key in step.others:
            folder, _, name = key[len(below) :].rpartition("/")
            if name in _JSON and folder:
                out.setdefault("items", {})[folder.replace("/", ".")] = to_json(
                    read_json(self.store, files, key)
                )
        return out

    def _check_items(self, below: str, handlers: Any, files: Collection[str]) -> None:
        """MissingData if no file of a saved item is left."""
        for name in handlers if isinstance(handlers, dict) else ():
            if not any(key.startswith(f"{below}{name}/") for key in files):
                raise MissingData(
                    f"{self.store.url}: the item {name}, which {below}{CHECKPOINT} names, is "
                    "missing",
                    hint="restore its folder from another copy; or open the folder of another item",
                )


def _in_order(arrays: Mapping[Key, ZarrArray]) -> dict[Key, ZarrArray]:
    """All states of a tensor together, and tensors in the order of their weights in the tree."""
    order: dict[str, int] = {}
    for key in sorted(arrays, key=lambda k: k.state != "weight"):
        order.setdefault(key.name, len(order))
    keys = sorted(arrays, key=lambda k: (order[k.name], k.state != "weight"))
    return {key: arrays[key] for key in keys}


def _without_notes(custom: Any) -> Any:
    """The custom metadata of a tree, without what ucformat noted in it."""
    return {k: v for k, v in custom.items() if k != NAMES} if isinstance(custom, dict) else custom


def _check_names(store: Store, keys: Any) -> None:
    twice = [key for key, n in Counter(keys).items() if n > 1]
    if twice:
        raise IntegrityError(
            f"{store.url}: two arrays of its items would be named {twice[0]}",
            hint=(
                "open the folder of one item; or rename the keys with dots in them where the "
                "tree is saved"
            ),
        )


# The trees of an Orbax checkpoint: the leaves that `_METADATA` lists, and their arrays.


#: In the custom metadata of a tree that ucformat wrote: name and state of each tensor whose path
#: says another.
NAMES = "ucformat"
#: The file with the leaves that are text.
STRINGS = "_strings.json"

_OWN_FILE = re.compile(
    rf"{TREE}|{CHECKPOINT}|_sharding|{re.escape(STRINGS)}|commit_success\.txt|array_metadatas/process_\d+|"
    rf"(ocdbt\.process_\d+/)?({re.escape(MANIFEST)}|d/[0-9a-f]{{32}})"
)

#: Kinds of leaves without data: empty parts of the tree.
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_SEQUENCE, _MAX_DIGITS = 1, 9  # the type of keys that are positions; digits of one
_ARRAYS = frozenset({"jax.Array", "np.ndarray"})


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf: its path, its type (an array, `scalar` or `string`), and its path with positions."""

    path: tuple[str, ...]
    kind: str
    state_path: StatePath

    @property
    def name(self) -> str:
        """Its name, which is also the name of its array in the storage."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class StoredTree:
    """The leaves that have data, and how they are stored."""

    arrays: tuple[StoredLeaf, ...]
    scalars: tuple[StoredLeaf, ...]
    strings: tuple[StoredLeaf, ...]
    empty: tuple[StoredLeaf, ...]  # parts of the tree without data
    zarr3: bool | None  # None: not recorded
    stores_fill: bool  # whether chunks with nothing but the fill value are stored like all others
    custom: Any


def _parse_tree(where: str, doc: Any) -> StoredTree:
    """Parse a `_METADATA` document, whose name in messages is `where`."""
    entries = doc.get("tree_metadata") if isinstance(doc, dict) else None
    if not isinstance(entries, dict):
        raise IntegrityError(f"{where} does not describe a tree")
    leaves: dict[str, list[StoredLeaf]] = {"arrays": [], "scalars": [], "strings": [], "empty": []}
    names: set[str] = set()
    for key, entry in entries.items():
        leaf, skipped = _leaf(f"{where}: {key[:200]}", entry)
        kind = leaf.kind
        if kind in _EMPTY:
            leaves["empty"].append(leaf)
            continue
        if skipped:
            raise UnsupportedError(
                f"{where}: {leaf.name} ({kind}) is not an array of its own: an old version of "
                "Orbax put it into the "
                "msgpack file 'checkpoint'",
                hint="restore the checkpoint with Orbax, and save it again",
            )
        if leaf.name in names:
            raise IntegrityError(
                f"{where}: two leaves are named {leaf.name}, and Orbax stored one over the other",
                hint=(
                    "keys of the tree with dots in them make such names: rename them where it "
                    "is saved"
                ),
            )
        names.add(leaf.name)
        if kind in _ARRAYS:
            leaves["arrays"].append(leaf)
        elif kind in ("scalar", "string"):
            leaves[f"{kind}s"].append(leaf)
        else:
            raise UnsupportedError(
                f"{where}: {leaf.name} is a {kind!r}, which is not read",
                hint=(
                    "arrays, numbers and text are: save it as one of these, or in an item of "
                    "its own"
                ),
            )
    zarr3 = doc.get("use_zarr3")
    return StoredTree(
        tuple(leaves["arrays"]),
        tuple(leaves["scalars"]),
        tuple(leaves["strings"]),
        tuple(leaves["empty"]),
        zarr3 if isinstance(zarr3, bool) else None,
        doc.get("store_array_data_equal_to_fill_value") is True,
        doc.get("custom_metadata"),
    )


def _leaf(where: str, entry: Any) -> tuple[StoredLeaf, bool]:
    """A leaf, and whether the value is stored elsewhere."""
    keys = entry.get("key_metadata") if isinstance(entry, dict) else None
    value = entry.get("value_metadata") if isinstance(entry, dict) else None
    if (
        not isinstance(keys, list)
        or not isinstance(value, dict)
        or not all(isinstance(k, dict) and isinstance(k.get("key"), str | int) for k in keys)
        or not isinstance(value.get("value_type"), str)
    ):
        raise IntegrityError(f"{where} is not described as a leaf of a tree")
    state_path = tuple(int(k["key"]) if _is_position(k) else str(k["key"]) for k in keys)
    leaf = StoredLeaf(tuple(str(k["key"]) for k in keys), value["value_type"], state_path)
    return leaf, value.get("skip_deserialize") is True


def _is_position(key: Mapping[str, Any]) -> bool:
    """Whether a key is a position in a list or tuple."""
    text = str(key["key"])
    return (
        key.get("key_type") == _SEQUENCE
        and text.isascii()
        and text.isdecimal()
        and len(text) <= _MAX_DIGITS
    )


# the path of an array that is an item of its own: it gets the name of the item
_UNNAMED = ("checkpoint",)
_METADATA = {".zarray": parse_v2, "zarr.json": parse_v3}
_PLAIN = {"bool": "?", "int64": "<q", "float64": "<d"}  # dtypes of Python's own numbers


class Item:
    """The leaves of an item, by their paths in the checkpoint, which begin with the item's name if there are several.

    Attributes:
        values: the location of each value in the item's folder, by its key in the store.
        ocdbt: whether the item is stored in OCDBT.
    """

    def __init__(self, store: Store, name: str, folder: str, sizes: Mapping[str, int]) -> None:
        self._store, self._folder = store, folder
        self._below = f"{folder}/" if folder else ""
        self._files = {k: ByteRange(k, 0, n) for k, n in sizes.items() if k.startswith(self._below)}
        where = f"{store.url}: {self._below}{TREE}"
        doc = read_json(store, self._files, self._below + TREE)
        self.tree = _parse_tree(where, doc)
        self.ocdbt = self._below + MANIFEST in sizes
        if doc.get("use_ocdbt") is True and not self.ocdbt:
            raise MissingData(
                f"{store.url}/{self._below}{MANIFEST} is missing, and the arrays of the "
                "checkpoint are in OCDBT",
                hint="the save did not finish, or the file was lost: restore it from another copy",
            )
        self.values: Mapping[str, Value] = self._files
        if self.ocdbt:
            self.values = {self._below + k: v for k, v in read_ocdbt(store, folder, sizes).items()}
        first = tuple(part for part in name.split(".") if part)
        self._paths = {
            leaf: first if first and leaf.path == _UNNAMED else first + leaf.path
            for leaf in self._leaves()
        }
        self.arrays: dict[tuple[str, ...], ZarrArray] = {}
        self.unreadable: dict[tuple[str, ...], str] = {}
        for leaf in self.tree.arrays:
            try:
                self.arrays[self._paths[leaf]] = self._array(leaf)
            except UnsupportedError as error:
                self.unreadable[self._paths[leaf]] = f"is not read: {error.message}"
        self.scalars = {self._paths[leaf]: self._array(leaf) for leaf in self.tree.scalars}

        self._first = first

    def files(self) -> set[str]:
        """The files of the checkpoint that Orbax writes for this item."""
        arrays = {array.path for array in (*self.arrays.values(), *self.scalars.values())}
        below = len(self._below)
        return {k for k in self._files if _OWN_FILE.fullmatch(k[below:]) or is_file_of(arrays, k)}

    def array_paths(self) -> Iterator[tuple[tuple[str, ...], StatePath]]:
        """The path of each array in the checkpoint, as text and with positions in lists."""
        return ((self._paths[leaf], self.state_path(leaf)) for leaf in self.tree.arrays)

    def others(self) -> tuple[StoredLeaf, ...]:
        """The leaves that are no arrays, empty parts of the tree included."""
        return self.tree.scalars + self.tree.strings + self.tree.empty

    def state_path(self, leaf: StoredLeaf) -> StatePath:
        """The path of a leaf in the checkpoint, with positions in lists."""
        is_item = self._paths.get(leaf) == self._first
        return self._paths[leaf] if is_item else (*self._first, *leaf.state_path)

    def noted_keys(self) -> dict[tuple[str, ...], Key]:
        """The name and state of tensors that were noted when ucformat wrote the tree, by path."""
        custom: Any = self.tree.custom
        if self._first or not isinstance(custom, dict) or not isinstance(custom.get(NAMES), dict):
            return {}
        noted = custom[NAMES]
        by_path = {leaf.path: noted.get(leaf.name) for leaf in self.tree.arrays}
        return {
            path: Key(*key)
            for path, key in by_path.items()
            if isinstance(key, list)
            and len(key) == 2
            and all(isinstance(part, str) for part in key)
        }

    def _leaves(self) -> tuple[StoredLeaf, ...]:
        return self.tree.arrays + self.tree.scalars + self.tree.strings

    def _array(self, leaf: StoredLeaf) -> ZarrArray:
        """The array of a leaf, from its metadata."""
        path = self._below + leaf.name
        documents = [name for name in _METADATA if f"{path}/{name}" in self.values]
        if self.tree.zarr3 is not None and len(documents) > 1:
            documents = ["zarr.json" if self.tree.zarr3 else ".zarray"]
        if len(documents) != 1:
            raise MissingData(
                f"{self._store.url}: the array {leaf.name}, which {self._below}{TREE} names, "
                + ("is not stored" if not documents else "is stored as Zarr v2 and as v3"),
                hint=(
                    "files were lost, or belong to another save: restore the folder from "
                    "another copy"
                ),
            )
        key = f"{path}/{documents[0]}"
        return _METADATA[documents[0]](
            path, f"{self._store.url}: {key}", read_json(self._store, self.values, key)
        )

    def strings(self) -> dict[tuple[str, ...], str]:
        """The leaves that are text."""
        if not self.tree.strings:
            return {}
        key = self._below + STRINGS
        if key not in self._files:
            raise MissingData(
                f"{self._store.url}/{key} is missing: it contains {self.tree.strings[0].name}"
            )
        texts = read_json(self._store, self._files, key)
        out = {}
        for leaf in self.tree.strings:
            value: Any = texts
            for part in leaf.name.split("/"):  # the name is a JSON pointer
                value = value.get(part) if isinstance(value, dict) else None
            if not isinstance(value, str):
                raise MissingData(f"{self._store.url}/{key} does not contain the text {leaf.name}")
            out[self._paths[leaf]] = value
        return out

    def random_keys(self) -> dict[str, str]:
        """The arrays that are JAX's typed random keys, with the name of the implementation."""
        folder = f"{self._below}array_metadatas/"
        keys = sorted(k for k in self._files if k.startswith(folder))
        if not keys:
            return {}
        doc = read_json(self._store, self._files, keys[0])  # every process writes the same
        entries = doc.get("array_metadatas") if isinstance(doc, dict) else None
        by_name = {leaf.name: path for leaf, path in self._paths.items()}
        out = {}
        for entry in entries if isinstance(entries, list) else []:
            metadata = entry.get("array_metadata") if isinstance(entry, dict) else None
            if not isinstance(metadata, dict) or not isinstance(metadata.get("ext_metadata"), dict):
                continue
            name, extensions = str(metadata.get("param_name")), metadata["ext_metadata"]
            if name in by_name and "random_key_impl" in extensions:
                out[".".join(by_name[name])] = str(extensions["random_key_impl"])
        return out


def scalar_json(name: str, array: ZarrArray, data: bytes) -> Any:
    """The JSON form of a leaf that is a number: with its dtype unless Python has its type."""
    if array.shape:
        raise IntegrityError(f"{name} should be a number, but is an array of {list(array.shape)}")
    if array.dtype in _PLAIN:
        return to_json(struct.unpack(_PLAIN[array.dtype], data)[0])
    return to_json(NdArray(array.dtype, (), data, fortran=False))
