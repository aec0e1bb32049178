"""What the folders of nodes, and slower tiers, have of each checkpoint: described, and merged on the way to rank 0.

A rank's packed file counts by its number, so the numbers that a node has are a few ranges. The
other files of a checkpoint are few, and the same on all nodes, which are named together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from ucformat.errors import IntegrityError, NotACheckpoint, UcformatError, UpgradeNeeded
from ucformat.schema import ATTEMPT, MANIFEST, TOMBSTONE
from ucformat.storage.concurrency import map_io
from ucformat.torch.comm.merging import Ranges, adjoined, merged
from ucformat.torch.comm.wire import message
from ucformat.torch.manager.steps import RunStep, read_step, step_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.storage.base import Store

__all__ = ["Contents", "contents_of", "number_of", "ranges_of"]

_RANK_FILE = re.compile(rf"data/({ATTEMPT})/rank-(\d{{5,7}})\.bin", re.ASCII)

#: A folder, and the id of a checkpoint in it.
Placed = tuple[str, str]
#: A folder, and an attempt in it.
Attempted = tuple[str, str]
#: A folder, and the keys of files in it.
Documents = tuple[str, tuple[str, ...]]


@message
class Contents:
    """What some places, which have numbers, have; later ones have higher numbers.

    Attributes:
        steps: the checkpoints of which a place has the manifest.
        manifests: the places that have it.
        unreadable: the reason, by folder, why a manifest cannot be read.
        files: the numbers of the ranks' files of an attempt, by place.
        documents: the places that have these other files.
        newer: the folders with a manifest that needs a later version.
    """

    steps: Mapping[Placed, RunStep] = field(default_factory=dict)
    manifests: Mapping[Placed, Ranges] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Attempted, tuple[tuple[int, Ranges], ...]] = field(default_factory=dict)
    documents: Mapping[Documents, Ranges] = field(default_factory=dict)
    newer: tuple[str, ...] = ()

    def __add__(self, other: Contents) -> Contents:
        return Contents(
            {**other.steps, **self.steps},
            merged(self.manifests, other.manifests, adjoined),
            {**other.unreadable, **self.unreadable},
            merged(self.files, other.files, lambda a, b: (*a, *b)),
            merged(self.documents, other.documents, adjoined),
            tuple(sorted({*self.newer, *other.newer})),
        )


def contents_of(store: Store, place: int, *, partial: bool = True) -> Contents:
    """Return what a tier's folder has of the checkpoints in it.

    Args:
        place: its number.
        partial: whether it may have some files of a committed checkpoint only, as the folder of a
            node (False: of these nothing is listed but the manifest, and nothing of what is removed).
    """
    numbers: defaultdict[Attempted, list[int]] = defaultdict(list)
    documents: defaultdict[str, list[str]] = defaultdict(list)
    folders: dict[str, int] = {}
    for info in store.list():
        folder, _, key = info.key.partition("/")
        step = step_of(folder)
        if step is None or not key:
            continue
        folders[folder] = step
        if (match := _RANK_FILE.fullmatch(key)) is not None:
            numbers[folder, match[1]].append(int(match[2]))
        else:
            documents[folder].append(key)
    here: Ranges = ((place, place + 1),)
    steps: dict[Placed, RunStep] = {}
    unreadable: dict[str, str] = {}
    newer: list[str] = []
    removed = {folder for folder in folders if TOMBSTONE in documents[folder]}

    def read(folder: str) -> RunStep | UcformatError:
        try:
            return read_step(f"{store.url}/{folder}", folders[folder])
        except (NotACheckpoint, IntegrityError, UpgradeNeeded) as error:
            return error

    committed = [f for f in folders if MANIFEST in documents[f] and f not in removed]
    for folder, answer in zip(committed, map_io(read, committed), strict=True):
        if isinstance(answer, RunStep):
            if not answer.is_remnant:
                steps[folder, answer.id] = answer
        elif isinstance(answer, NotACheckpoint):  # removed at this instant
            removed.add(folder)
        else:
            unreadable[folder] = answer.message
            if isinstance(answer, UpgradeNeeded):
                newer.append(folder)
    unused = set() if partial else removed | {folder for folder, _ in steps}
    return Contents(
        steps,
        dict.fromkeys(steps, here),
        unreadable,
        {at: ((place, ranges_of(n)),) for at, n in numbers.items() if at[0] not in unused},
        {(f, tuple(sorted(keys))): here for f, keys in documents.items() if partial and keys},
        tuple(sorted(newer)),
    )


def number_of(key: str) -> int | None:
    """Return the number in the key of a rank's packed file; None for other files."""
    match = _RANK_FILE.fullmatch(key)
    return int(match[2]) if match else None


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return ascending numbers as ranges."""
    out: Ranges = ()
    for number in sorted(numbers):
        out = adjoined(out, ((number, number + 1),)) if out else ((number, number + 1),)
    return out
