"""Find the Orbax checkpoint in a folder: its step, and those of its items that are trees of arrays.

A `CheckpointManager` has a folder for each step (`100`, `step_100`), in which each item has a
folder (`default`, `state`, `params`, …); a `Checkpointer` writes a single item without these. The
folder of a tree contains `_METADATA`. Until a save is finished, the names of its folders contain
`.orbax-checkpoint-tmp`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from ucformat.errors import MissingData, UnsupportedError, UsageError, first_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.storage.base import Store


TREE = "_METADATA"
CHECKPOINT = "_CHECKPOINT_METADATA"
MANIFEST = "manifest.ocdbt"
_ARRAY_FILES = (MANIFEST, ".zarray", "zarr.json")
_AGGREGATE = "checkpoint"  # msgpack, of Orbax before 0.3 or so
_TEMPORARY = ".orbax-checkpoint-tmp"

_MAX_LISTED = 10_000  # files that are listed to recognise a folder
_MAX_DEPTH = 4  # <step>/<item>/<part of the item>/_METADATA
_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint.

    Attributes:
        folder: its key in the store; empty if it is the root.
        trees: the folder of each tree, by the name of the item.
    """

    folder: str
    trees: dict[str, str]
    sizes: dict[str, int]
    others: tuple[str, ...]
    number: int | None


def looks_like_orbax(store: Store) -> bool:
    """Whether Orbax wrote this folder, or a step or item in it; reads a listing only."""
    return any(_is_marker(info.key) for info in islice(store.list(), _MAX_LISTED))


def _is_marker(key: str) -> bool:
    *folders, name = key.split("/")
    if len(folders) >= _MAX_DEPTH:
        return False
    return name in (TREE, CHECKPOINT, MANIFEST) or any(_TEMPORARY in f for f in folders)


def find_step(store: Store) -> Step:
    """Find the checkpoint in the folder of an item, of a step, or of a single step."""
    sizes = {info.key: info.size for info in store.list()}
    keys = list(sizes)
    if _TEMPORARY in store.url.rstrip("/").rpartition("/")[2]:
        _raise_unfinished(store, store.url)
    trees = sorted(
        {_parent(k) for k in keys if k.rpartition("/")[2] == TREE and k.count("/") < _MAX_DEPTH}
    )
    finished = [t for t in trees if _TEMPORARY not in t]
    if not finished:
        _raise_no_tree(store, keys)
    steps = sorted({t.split("/")[0] for t in finished}, key=_order)
    folder = ""
    if "" not in finished and CHECKPOINT not in keys and all(_STEP.fullmatch(s) for s in steps):
        if len(steps) > 1:
            raise UsageError(
                f"{store.url} holds the Orbax checkpoints of several steps: "
                f"{first_names(steps, 10)}",
                hint=f"open the folder of one of them: {store.url}/{steps[-1]}",
            )
        folder = steps[0]
    below = f"{folder}/" if folder else ""
    sizes = {key: n for key, n in sizes.items() if key.startswith(below)}
    for key in sizes:
        if _TEMPORARY in key:
            _raise_unfinished(store, key)
    inside = [t for t in finished if t == folder or t.startswith(below)]
    if folder in inside:  # a single item without a step
        inside = [folder]
    names = {t[len(below) :].replace("/", "."): t for t in inside}
    within = tuple(f"{t}/" if t else "" for t in inside)
    others = tuple(key for key in sizes if not key.startswith(within))
    for key in others:
        if key.rpartition("/")[2] in _ARRAY_FILES:
            raise MissingData(
                f"{store.url}: {key} belongs to an item whose {TREE} is missing",
                hint=(
                    "the file was lost: restore it from another copy; or open the folder of "
                    "another item"
                ),
            )
    return Step(folder, names, sizes, others, _number(store, folder, alone=folder in inside))


def _number(store: Store, folder: str, *, alone: bool) -> int | None:
    """The step in the name of the folder or, for an item, of its own or its parent's."""
    names = [part for part in f"{store.url}/{folder}".split("/") if part]
    for name in names[-1:] if not alone else names[-1:-3:-1]:
        m = _STEP.fullmatch(name)
        if m and (not alone or name.isdecimal()):
            return int(m[1])
    return None


def _order(step: str) -> tuple[int, str]:
    m = _STEP.fullmatch(step)
    return (int(m[1]) if m else 0, step)


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _raise_unfinished(store: Store, label: str) -> NoReturn:
    raise UnsupportedError(
        f"{label} is of a save by Orbax that did not finish"
        + ("" if label == store.url else f" (in {store.url})"),
        hint=(
            "wait until it has, or open another step; Orbax itself deletes the remains of a "
            "killed run"
        ),
    )


def _raise_no_tree(store: Store, keys: Iterable[str]) -> NoReturn:
    """Raise the reason why a folder that looks like Orbax's has no tree."""
    keys = list(keys)
    for key in keys:
        if _TEMPORARY in key:
            _raise_unfinished(store, key)
    if any(_parent(k) == "" and k.rpartition("/")[2] == _AGGREGATE for k in keys):
        raise UnsupportedError(
            f"{store.url} was written by an old version of Orbax, whose tree is the msgpack file "
            f"{_AGGREGATE!r}",
            hint="restore it with Orbax, and save it again with a version of 2024 or later",
        )
    raise MissingData(
        f"{store.url} has no {TREE}, which describes the tree of an Orbax checkpoint",
        hint=(
            "the save did not finish, files were lost, or this is one process's part: open the "
            "folder above it"
        ),
    )
