"""PyTorch DCP checkpoints, read in place: tensors, optimizer groups, other values and the training step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.tensor import TensorInfo
from ucformat.reading.readable import (
    CheckpointMetadata,
    GroupPlace,
    LazyMapping,
    LazySequence,
    json_key,
)
from ucformat.reading.stand_ins import OpaqueFile, why_refused
from ucformat.reading.state_names import GROUPS, dotted, split_state
from ucformat.reading.values import from_json, packed, shared_value, to_json
from ucformat.schema import ITEMSIZE
from ucformat.sources.distcp.state import name_entries
from ucformat.sources.index import Group, IndexedSource, TensorIndex

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ucformat.reading.readable import FileRecord
    from ucformat.reading.readable import StatePath as Path
    from ucformat.reading.stand_ins import StoredTensor
    from ucformat.sources.distcp.metadata import Items, Metadata
    from ucformat.sources.distcp.state import NamedEntries, Optimizer
    from ucformat.sources.pickle.file import TorchFile

    Values = Mapping[str, TorchFile | OpaqueFile]

STEPS = ("global_step", "global_steps", "step", "iteration")
_MAX_NBYTES = 256 << 20  # bytes of the tensors in one value


def plain_value(file: TorchFile | OpaqueFile, path: str) -> Any:
    """Convert an item to its JSON form, with all tensors inside.

    An item's tensors are not tensors of the checkpoint.
    """
    if isinstance(file, OpaqueFile):
        return to_json(file.opaque())
    remaining = _MAX_NBYTES

    def read(tensor: StoredTensor) -> bytes:
        nonlocal remaining
        remaining -= tensor.nbytes
        if remaining < 0:
            raise UnsupportedError(
                f"{path} in {file.key} holds more than {_MAX_NBYTES:,} bytes of tensors inside "
                "one pickled value"
            )
        return file.read(tensor)

    return to_json(file.value, read=read, path=path, small=_MAX_NBYTES, exact=True)


def _raw_groups(optimizer: Optimizer, files: Values) -> list[dict[str, Any]]:
    """The groups of a nested state dict as in the file, each value in its JSON form; `params` as a list."""
    groups: dict[int, dict[str, Any]] = {}
    for fqn, below in optimizer.options.items():
        value = plain_value(files[fqn], fqn)
        # PyTorch 2.3 and before store it as one value
        if len(below) == 1 and (items := _items(value)) is not None:
            groups |= {i: dict(g) for i, g in enumerate(items) if isinstance(g, dict)}
        elif len(below) >= 3 and isinstance(below[1], int):
            node = groups.setdefault(below[1], {})
            for part in below[2:-1]:
                node = node.setdefault(json_key(part), {})
            node[json_key(below[-1])] = value
    for group in groups.values():
        params = group.get("params", [])
        if isinstance(params, dict):  # a list that DCP flattened
            group["params"] = list(params.values())
        else:
            group["params"] = _items(params) or []
    return [groups[i] for i in sorted(groups)]


def _items(value: Any) -> list[Any] | None:
    """The items of a list or a tuple in its JSON form."""
    items = value["$tuple"] if isinstance(value, dict) and set(value) == {"$tuple"} else value
    return items if isinstance(items, list) else None


def _groups_of(
    optimizer: Optimizer, files: Values
) -> list[tuple[Mapping[str, Any], GroupPlace | None]] | None:
    """The optimizer groups in the form of `CheckpointMetadata`, and the place of each; None if they are unknown.

    A group without a place is also stored as an object of the checkpoint.
    """
    flat = {
        f: below for f, below in optimizer.options.items() if len(below) == 1 and below[0] != GROUPS
    }
    named: list[tuple[Group, list[str]]] = []
    if flat:
        named = _flattened(optimizer, flat, files)
    else:
        for raw in _raw_groups(optimizer, {f: files[f] for f in optimizer.options}):
            entries = raw.pop("params")
            if optimizer.numbers is None and not all(isinstance(entry, str) for entry in entries):
                return None
            if optimizer.numbers and len(raw.get("param_names") or ()) == len(entries):
                raw.pop("param_names")
            named.append((Group([optimizer.name(p) for p in entries], raw), entries))
    out: list[tuple[Mapping[str, Any], GroupPlace | None]] = []
    kept_as_object = optimizer.numbers is not None or (GROUPS,) in optimizer.options.values()
    for group, entries in named:
        group.state = plain_states(group, optimizer.plain, files)
        out.append(
            (
                group.json(),
                None
                if kept_as_object
                else GroupPlace(optimizer.root, tuple(entries), flattened=bool(flat)),
            )
        )
    return out


def plain_states(
    group: Group, entries: Mapping[str, tuple[str, str]], files: Values
) -> dict[str, Any]:
    """The states of a group's parameters that are not tensors.

    Args:
        entries: the name and the state of each.
    """
    names = set(group.names)
    by_state: dict[str, dict[str, Any]] = {}
    for fqn, (name, state) in entries.items():
        if name in names:
            by_state.setdefault(state, {})[name] = plain_value(files[fqn], fqn)
    return {state: shared_value(values) for state, values in by_state.items()}


def _flattened(
    optimizer: Optimizer, flat: Mapping[str, Path], files: Values
) -> list[tuple[Group, list[str]]]:
    """The groups of a flattened state dict, which lacks them: parameters with equal hyper-parameters form one."""
    options: dict[str, dict[str, Any]] = {}
    for fqn, below in flat.items():
        split = split_state(str(below[0])[len(GROUPS) + 1 :], optimizer.parameters)
        if split is not None:
            options.setdefault(split[0], {})[split[1]] = plain_value(files[fqn], fqn)
    groups: dict[str, tuple[Group, list[str]]] = {}
    for name, mine in options.items():
        group, names = groups.setdefault(json.dumps(mine, sort_keys=True), (Group([], mine), []))
        group.names.append(optimizer.prefix + name)
        names.append(name)
    return list(groups.values())


def nested_objects(
    values: Mapping[str, Path], files: Values, tensors: Iterable[Path]
) -> dict[str, Any]:
    """Nest values as in the state dict; lists are restored if no tensor was in them."""
    with_tensors = {p[:i] for p in tensors for i in range(len(p))}
    tree: dict[Any, Any] = {}
    for fqn, path in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise IntegrityError(
                    f"the checkpoint has {fqn} inside an entry that is not a dictionary"
                )
        leaf = Leaf(packed(plain_value(files[fqn], fqn)))
        if node.setdefault(path[-1], leaf) is not leaf:
            raise IntegrityError(f"the checkpoint has two entries {fqn}")
    objects: dict[str, Any] = json_of_tree(tree, with_tensors)
    return objects


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value in its JSON form, in a tree of nested dictionaries."""

    data: Any


def json_of_tree(node: Any, with_tensors: Collection[Path], path: Path = ()) -> Any:
    """The JSON form of a tree that DCP flattened; lists in which no tensor was are lists again."""
    if isinstance(node, Leaf):
        return node.data
    inner = {k: json_of_tree(v, with_tensors, (*path, k)) for k, v in node.items()}
    if inner and path not in with_tensors and all(isinstance(k, int) for k in inner):
        # DCP leaves out empty dictionaries
        return [inner.get(i, {}) for i in range(max(inner) + 1)]
    return {json_key(k): v for k, v in inner.items()}


def _step_of(candidates: Mapping[Path, Any]) -> int | None:
    """The training step: the outermost of the candidates; None if those disagree."""
    for depth in sorted({len(p) for p in candidates}):
        numbers = {v for p, v in candidates.items() if len(p) == depth and type(v) is int}
        if numbers:
            return numbers.pop() if len(numbers) == 1 else None
    return None


_MAX_STEP_DEPTH = 3  # keys in the path of a `step` that may be the training step


class OpenDcp(IndexedSource):
    """An opened DCP checkpoint."""

    kind = "dcp"

    def __init__(
        self, items: Items, groups: Sequence[Sequence[str]] | None, owners: Mapping[str, str] | None
    ) -> None:
        self.store, self.items, meta = items.store, items, items.meta

        def read_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
            return _raw_groups(optimizer, self.items.values(optimizer.options))

        self.named = name_entries(meta, read_groups, groups, owners)
        self.contents = TensorIndex()
        for key, fqn in self.named.tensors.items():
            entry = meta.tensors[fqn]
            if entry.dtype in ITEMSIZE:
                info = TensorInfo(*key, entry.dtype, entry.shape)
                self.contents.put(info, partial(items.extents, fqn, info))
            else:
                self.contents.refuse(key, why_refused(entry.dtype))
        self.metadata = self._make_metadata(ItemValues(items, self.named))

    def _make_metadata(self, values: ItemValues) -> CheckpointMetadata:
        meta = self.items.meta
        version = meta.root.get("version")
        groups, places = values.lazy_groups()
        return CheckpointMetadata(
            tensor_list=self.contents.tensor_list(groups),
            groups=groups,
            places=places,
            objects=LazyMapping(values.objects),
            paths={
                key: (_path(meta, fqn),)
                for key, fqn in self.named.tensors.items()
                if key in self.contents.infos
            },
            unreadable=self.contents.unreadable,
            step=values.step(),
            engine={
                "name": "torch.distributed.checkpoint",
                "version": version if isinstance(version, str) else "",
            },
            files=(meta.file, *meta.files),
            save_id=meta.save_id,
        )

    def records(self) -> Iterator[FileRecord]:
        """List every record of the archives of all items; opens each."""
        return self.items.records()


def _path(meta: Metadata, fqn: str) -> Path:
    """The path of an entry in the program's state."""
    path = meta.paths.get(fqn, (fqn,))
    return path if dotted(path) == fqn else (fqn,)


class ItemValues:
    """The values in items that are not tensors: there may be thousands, so most are read when first used."""

    def __init__(self, items: Items, named: NamedEntries) -> None:
        self._items, self._named = items, named
        self._placed = LazySequence(self._read_groups)

    def _read_groups(self) -> list[list[tuple[Mapping[str, Any], GroupPlace | None]] | None]:
        """The groups of each optimizer."""
        optimizers = self._named.optimizers
        files = self._items.values(f for o in optimizers for f in (*o.options, *o.plain))
        return [_groups_of(o, files) for o in optimizers]

    def lazy_groups(
        self,
    ) -> tuple[LazySequence[Mapping[str, Any]], LazySequence[GroupPlace | None]]:
        """The groups of all optimizers, and the place of each."""
        groups = LazySequence(
            lambda: tuple(group for placed in self._placed for group, _ in placed or ())
        )
        places = LazySequence(
            lambda: tuple(place for placed in self._placed for _, place in placed or ())
        )
        return groups, places

    def objects(self) -> Mapping[str, Any]:
        """Read all values except those of optimizers."""
        meta, values = self._items.meta, dict(self._named.values)
        for optimizer, groups in zip(self._named.optimizers, self._placed, strict=True):
            if not groups or any(place is None for _, place in groups):
                values |= {f: (*optimizer.root, *below) for f, below in optimizer.options.items()}
        order = {f: i for i, f in enumerate(meta.paths)}
        values = dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order))))
        tensors = [meta.paths.get(f, (f,)) for f in self._named.tensors.values()]
        return nested_objects(values, self._items.values(values), tensors)

    def step(self) -> int | None:
        """Read the training step, if a value near the top of the state has one of the names in `STEPS`."""
        meta = self._items.meta
        paths = self._named.values | {
            fqn: meta.paths.get(fqn, (fqn,))
            for key, fqn in self._named.tensors.items()
            if key.state == "weight" and meta.tensors[fqn].shape == ()
        }
        candidates = {
            f: p for f, p in paths.items() if p[-1] in STEPS and len(p) <= _MAX_STEP_DEPTH
        }
        files = self._items.values(candidates)
        return _step_of(
            {path: _integer(plain_value(files[fqn], fqn)) for fqn, path in candidates.items()}
        )


def _integer(value: Any) -> Any:
    """A plain integer, or the one in a 0-d tensor or NumPy value of integers."""
    if not isinstance(value, dict):
        return value
    decoded = from_json(value)
    return (
        int(decoded)
        if isinstance(decoded, np.ndarray | np.integer)
        and decoded.dtype.kind in "iu"
        and not decoded.shape
        else value
    )
