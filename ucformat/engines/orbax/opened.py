"""Orbax checkpoints, read in place: in OCDBT or in files, of Zarr v2 or v3."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ucformat.engines.orbax.folder import CHECKPOINT, Step
from ucformat.engines.orbax.tree import NAMES, Item, scalar_json, tensor_keys
from ucformat.engines.orbax.zarr_chunks import Chunks
from ucformat.errors import IntegrityError, MissingData
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.reading.readable import CheckpointMetadata, path_to_json, unreadable_error
from ucformat.sources.index import unknown_tensor
from ucformat.sources.values import to_json
from ucformat.storage.base import ByteRange
from ucformat.storage.decoded import DecodedStore, read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ucformat.engines.orbax.zarr_array import Array
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store

_MISSING_HINT = "files were lost, or the save was incomplete: restore them from another copy"
_JSON = ("metadata", "metrics")  # the files of items that are JSON
_OWN = (CHECKPOINT, "commit_success.txt", "orbax.checkpoint")  # bookkeeping of Orbax


class OpenOrbax:
    """An opened Orbax checkpoint."""

    kind = "orbax"
    part = ""  # `_METADATA` describes the arrays of all processes

    def __init__(self, store: Store, step: Step, *, fill_missing: bool | None) -> None:
        several = len(step.trees) > 1
        items = [
            Item(store, name if several else "", at, step.sizes) for name, at in step.trees.items()
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
        self._chunks = Chunks(
            store,
            {key: value for item in items for key, value in item.values.items()},
            {array.path: array for array in (*arrays.values(), *scalars.values())},
            filled,
            _MISSING_HINT,
        )
        self.store: Store = DecodedStore(store, self._chunks)
        keys = tensor_keys({path: array.shape for path, array in arrays.items()})
        keys |= {path: Key(".".join(path), "weight") for path in unreadable}
        for item in items:
            keys |= item.noted_keys()
        _check_names(store, keys.values())
        self._arrays = {keys[path]: array for path, array in arrays.items()}
        numbers = {
            ".".join(p): scalar_json(".".join(p), a, self._read(a)) for p, a in scalars.items()
        }
        texts = {".".join(p): text for item in items for p, text in item.strings().items()}
        objects: dict[str, Any] = {**numbers, **texts}
        if more := self._other_objects(step, items):
            objects["orbax"] = more
        own = {key for key in step.others if key.rpartition("/")[2] in (*_OWN, *_JSON)}
        own |= {key for item in items for key in item.files()}
        self.metadata = CheckpointMetadata(
            tensor_list=TensorList(
                tuple(
                    TensorInfo(*k, self._arrays[k].dtype, self._arrays[k].shape)
                    for k in self._order()
                )
            ),
            objects=objects,
            paths={
                keys[i.path_of(leaf)]: (i.state_path(leaf),)
                for i in items
                for leaf in i.tree.arrays
                if i.path_of(leaf) in arrays
            },
            unreadable={keys[path]: why for path, why in unreadable.items()},
            step=self._step(numbers, step),
            layout={
                "ocdbt": any(i.ocdbt for i in items),
                "zarr3": any(i.tree.zarr3 for i in items),
            },
            engine={"name": "orbax"},
            files=tuple(key for key in step.sizes if key in own),
            folder=step.folder,
        )

    def _order(self) -> list[Key]:
        """All states of a tensor together, and tensors in the order of their weights in the tree."""
        order: dict[str, int] = {}
        for key in sorted(self._arrays, key=lambda k: k.state != "weight"):
            order.setdefault(key.name, len(order))
        return sorted(self._arrays, key=lambda k: (order[k.name], k.state != "weight"))

    def _read(self, array: Array) -> bytes:
        """The bytes of a 0-d array."""
        if array.shape:
            return b""
        extent = next(iter(self._chunks.extents(array)))
        return self.store.read(extent.file, extent.offset, array.itemsize)

    def _step(self, numbers: dict[str, Any], step: Step) -> int | None:
        """The leaf `step` at the root of the only tree or of one of several; otherwise the step in the folder name."""
        for name in ("step", *(f"{tree}.step" for tree in step.trees)):
            if type(numbers.get(name)) is int:
                return int(numbers[name])
            for key, array in self._arrays.items():
                if (
                    key == (name, "weight")
                    and not array.shape
                    and array.dtype.startswith(("int", "uint"))
                ):
                    return int.from_bytes(
                        self._read(array), "little", signed=array.dtype.startswith("int")
                    )
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
                out |= {
                    k: to_json(document[k])
                    for k in ("metrics", "custom_metadata")
                    if document.get(k)
                }
        custom = {
            name: own
            for name, i in zip(step.trees, items, strict=True)
            if (own := _without_notes(i.tree.custom))
        }
        if custom:
            out["trees"] = to_json(custom)
        others = [(item.state_path(leaf), leaf.kind) for item in items for leaf in item.others()]
        if others:
            out["leaves"] = [[path_to_json(path), kind] for path, kind in others]
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
                    f"{self.store.url}: the item {name}, which {below}{CHECKPOINT} names, is missing",
                    hint="restore its folder from another copy; or open the folder of another item",
                )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Find where the chunks of an array are stored."""
        if key in self.metadata.unreadable:
            raise unreadable_error({key: self.metadata.unreadable[key]}, self.store.url)
        if key not in self._arrays:
            raise unknown_tensor(key, self._arrays, self.store.url)
        return self._chunks.extents(self._arrays[key], within)

    def records(self) -> Iterator[FileRecord]:
        """None: Orbax has no checksums of data."""
        yield from ()


def _without_notes(custom: Any) -> Any:
    """The custom metadata of a tree, without what ucformat noted in it."""
    return {k: v for k, v in custom.items() if k != NAMES} if isinstance(custom, dict) else custom


def _check_names(store: Store, keys: Any) -> None:
    twice = [key for key, n in Counter(keys).items() if n > 1]
    if twice:
        raise IntegrityError(
            f"{store.url}: two arrays of its items would be named {twice[0]}",
            hint="open the folder of one item; or rename the keys with dots in them where the tree is saved",
        )
