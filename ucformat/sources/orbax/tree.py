"""The tree of an Orbax checkpoint, as `_METADATA` tells it: the path and kind of each leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ucformat.errors import IntegrityError, Refused

__all__ = ["Leaf", "Tree", "parse_tree"]

#: Kinds of leaves without data: they are the empty parts of the tree.
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_ARRAYS = frozenset({"jax.Array", "np.ndarray"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf: its path from the root, and what it was: an array, a `scalar`, a `string`."""

    path: tuple[str, ...]
    kind: str

    @property
    def name(self) -> str:
        """Its name, which is the name of its array in the storage."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Tree:
    """The leaves that have data, and how they are stored."""

    arrays: tuple[Leaf, ...]
    scalars: tuple[Leaf, ...]
    strings: tuple[Leaf, ...]
    zarr3: bool | None  # None: it does not say
    stores_fill: bool  # chunks that hold nothing but the fill value are stored like all others
    custom: Any


def parse_tree(where: str, doc: Any) -> Tree:
    """The tree that a `_METADATA` describes; `where` names it in messages."""
    entries = doc.get("tree_metadata") if isinstance(doc, dict) else None
    if not isinstance(entries, dict):
        raise IntegrityError(f"{where} does not describe a tree")
    found: dict[str, list[Leaf]] = {"arrays": [], "scalars": [], "strings": []}
    names: set[str] = set()
    for key, entry in entries.items():
        path, kind, skipped = _leaf(f"{where}: {key[:200]}", entry)
        if kind in _EMPTY:
            continue
        leaf = Leaf(path, kind)
        if skipped:
            raise Refused(
                f"{where}: {leaf.name} ({kind}) is not an array of its own: an old version of Orbax put it in the "
                "msgpack file 'checkpoint'",
                hint="restore the checkpoint with Orbax, and save it again",
            )
        if leaf.name in names:
            raise IntegrityError(
                f"{where}: two leaves are named {leaf.name}, and Orbax stored one over the other",
                hint="keys of the tree with dots in them make such names: rename them where it is saved",
            )
        names.add(leaf.name)
        if kind in _ARRAYS:
            found["arrays"].append(leaf)
        elif kind in ("scalar", "string"):
            found[f"{kind}s"].append(leaf)
        else:
            raise Refused(
                f"{where}: {leaf.name} is a {kind!r}, which is not read",
                hint="arrays, numbers and text are; save it as one of these, or in an item of its own",
            )
    zarr3 = doc.get("use_zarr3")
    return Tree(
        tuple(found["arrays"]),
        tuple(found["scalars"]),
        tuple(found["strings"]),
        zarr3 if isinstance(zarr3, bool) else None,
        doc.get("store_array_data_equal_to_fill_value") is True,
        doc.get("custom_metadata"),
    )


def _leaf(where: str, entry: Any) -> tuple[tuple[str, ...], str, bool]:
    """Path, kind, and whether its value is stored elsewhere."""
    keys = entry.get("key_metadata") if isinstance(entry, dict) else None
    value = entry.get("value_metadata") if isinstance(entry, dict) else None
    if (
        not isinstance(keys, list)
        or not isinstance(value, dict)
        or not all(isinstance(k, dict) and isinstance(k.get("key"), str | int) for k in keys)
        or not isinstance(value.get("value_type"), str)
    ):
        raise IntegrityError(f"{where} is not described as a leaf of a tree")
    return tuple(str(k["key"]) for k in keys), value["value_type"], value.get("skip_deserialize") is True
