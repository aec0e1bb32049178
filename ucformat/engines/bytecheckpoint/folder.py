"""The files of one ByteCheckpoint checkpoint.

A save folder holds `latest_checkpointed_iteration.txt`, a number N, and the folders
`global_step_N`. One of these holds `model` and `optimizer`, each with `.metadata` and a file
`__R_K.distcp` of each rank R; `extra_state` with `extra_state_rank_R.pt`; and the data loader's
own files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import MissingData, NotFound, UsageError
from ucformat.sources.distcp import METADATA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.storage.base import Info, Store


LATEST = "latest_checkpointed_iteration.txt"
_CLASS = b"bytecheckpoint."
_HEAD = 512
_PARTS = ("model", "optimizer")
_STEP = re.compile(r"(?:.*/)?global_step_(\d+)/?")
_EXTRA = re.compile(r"extra_state/extra_state_rank_(\d+)\.pt")
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one step, as keys of the store; `below` is its folder with a trailing `/`, or "" for the root."""

    below: str
    # the folder of `model` and `optimizer`, with a trailing `/` unless it is the root
    parts: dict[str, str]
    extra: tuple[str, ...]  # extra state, by rank
    others: tuple[str, ...]
    empty: tuple[str, ...]  # files of ranks that had nothing to write
    step: int | None


def find_folder(store: Store) -> Folder:
    """Find the newest step of a save folder, or the step or part at the store's root."""
    if _is_ours(store, ""):
        name = "optimizer" if store.url.rstrip("/").endswith("/optimizer") else "model"
        step = _step(store.url.rstrip("/").rpartition("/")[0])
        return Folder("", {name: ""}, (), (), _empty(store.list()), step)
    below = ""
    if not any(_is_ours(store, f"{part}/") for part in _PARTS):
        below = f"global_step_{_latest(store)}/"
    infos = list(store.list(below.rstrip("/")))
    keys = [info.key for info in infos]
    if not keys:
        raise NotFound(f"{store.url}: {LATEST} names {below[:-1]}, where there is no checkpoint")
    folders = {part: f"{below}{part}/" for part in _PARTS}
    parts = {p: f for p, f in folders.items() if any(k.startswith(f) for k in keys)}
    for folder in dict.fromkeys((folders["model"], *parts.values())):
        if _is_ours(store, folder):
            continue
        raise MissingData(
            f"{folder}{METADATA} is missing or damaged; each step has a model, and that file "
            "describes it",
            hint=(
                "copy the folder again from where it was saved; the step's other folders can be "
                "opened separately"
            ),
        )
    extra = {int(m[1]): key for key in keys if (m := _EXTRA.fullmatch(key.removeprefix(below)))}
    if sorted(extra) != list(range(len(extra))):
        missing = next(r for r in range(len(extra)) if r not in extra)
        raise NotFound(
            f"{below}extra_state lacks the file of rank {missing}, but has that of rank "
            f"{max(extra)}",
            hint=(
                "copy it again from where it was saved, or remove extra_state to open the "
                "checkpoint without it"
            ),
        )
    in_parts = {*extra.values(), *(k for k in keys if any(k.startswith(p) for p in parts.values()))}
    others = tuple(k for k in keys if k not in in_parts and k != LATEST)
    by_rank = tuple(extra[r] for r in sorted(extra))
    return Folder(below, parts, by_rank, others, _empty(infos), _step(below or store.url))


def _empty(infos: Iterable[Info]) -> tuple[str, ...]:
    return tuple(info.key for info in infos if info.size == 0 and info.key.endswith(".distcp"))


def _step(url: str) -> int | None:
    match = _STEP.fullmatch(url)
    return int(match[1]) if match else None


def _is_ours(store: Store, below: str) -> bool:
    key = below + METADATA
    try:
        return _CLASS in store.read(key, 0, min(_HEAD, store.info(key).size))
    except NotFound:
        return False


def _latest(store: Store) -> int | None:
    try:
        data = store.read(LATEST, 0, min(64, store.info(LATEST).size))
        text = data.decode("ascii", "replace").strip()
    except NotFound:
        steps = {
            m[1]
            for info in store.list()
            if (m := re.match(r"global_step_(\d+)/(?:model|optimizer)/", info.key))
        }
        if len(steps) > 1 and any(_is_ours(store, f"global_step_{s}/model/") for s in steps):
            raise UsageError(
                f"{store.url} has the steps {', '.join(sorted(steps, key=int)[:_MAX_LISTED])} "
                f"and no {LATEST}",
                hint="open the folder of one step: …/global_step_N",
            ) from None
        text = steps.pop() if len(steps) == 1 else ""
    return int(text) if text.isdigit() else None
