"""Where each file of a checkpoint is read from: pure functions of what places have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ucformat.schema import MANIFEST
from ucformat.torch.comm.merging import Ranges
from ucformat.torch.comm.wire import message
from ucformat.torch.tiers.inventory import number_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ucformat.torch.tiers.inventory import Contents, Placed

__all__ = ["Copies", "Places", "choose_places", "copies_of"]


@message
class Places:
    """The place from which each file of a checkpoint is read, the same on all ranks.

    Attributes:
        folder: of the checkpoint, in each place.
        files: of the packed files of ranks, by number; -1: in no place.
        documents: of other files, by key.
        rest: of all others: that which has the whole checkpoint; -1: there is none.
    """

    folder: str
    files: NDArray[np.int32]
    documents: Mapping[str, int]
    rest: int

    def locate(self, key: str) -> int | None:
        """Return the place of a file; None if it is in none."""
        number = number_of(key)
        place = -1
        if number is not None and number < len(self.files):
            place = int(self.files[number])
        place = self.documents.get(key, place if place >= 0 else self.rest)
        return place if place >= 0 else None

    @property
    def used(self) -> tuple[int, ...]:
        """All places from which something may be read, ascending."""
        numbers = {*np.unique(self.files).tolist(), *self.documents.values(), self.rest}
        return tuple(sorted(n for n in numbers if n >= 0))


@message
class Copies:
    """The places that have files of a checkpoint, in which copies that were found damaged do not count.

    Attributes:
        files: of packed files, by place.
        documents: by key.
        whole: those that have the whole checkpoint.
        leftovers: as `files`, of tiers in which it is not committed.
    """

    files: tuple[tuple[int, Ranges], ...]
    documents: Mapping[str, tuple[int, ...]]
    whole: tuple[int, ...]
    leftovers: tuple[tuple[int, Ranges], ...] = ()


def copies_of(contents: Contents, placed: Placed, attempt: str, nodes: int) -> Copies:
    """Return which places have files of a checkpoint.

    Args:
        attempt: that of its manifest.
        nodes: places with lower numbers are nodes, which need not have all files; others have the
            whole checkpoint if they have its manifest.
    """
    folder, _ = placed
    manifests = _numbers(contents.manifests.get(placed, ()))
    documents: defaultdict[str, list[int]] = defaultdict(list)
    for (other, keys), ranges in contents.documents.items():
        if other == folder:
            for key in keys:
                documents[key] += _numbers(ranges)
    documents[MANIFEST] = [n for n in manifests if n < nodes]
    files = contents.files.get((folder, attempt), ())
    return Copies(
        tuple(at for at in files if at[0] < nodes),
        {key: tuple(sorted(numbers)) for key, numbers in documents.items()},
        tuple(n for n in manifests if n >= nodes),
        tuple(at for at in files if at[0] >= nodes),
    )


def choose_places(
    copies: Copies,
    folder: str,
    keys: Iterable[str],
    damaged: Collection[tuple[int, str]] = (),
    near: Sequence[int] = (),
) -> tuple[Places, list[str]]:
    """Choose a place for each file.

    Of the packed files, each node serves about as many as the others; a file is read on the node
    that runs the rank of its number, if that has it. Slower tiers serve what no node has: one that has all of the
    checkpoint, or else one in which it is not committed.

    Args:
        keys: of all files of the checkpoint.
        damaged: copies that are not read: place and key.
        near: the node of each rank of this launch.

    Returns:
        the places, and the keys of files that no place has.
    """
    by_number, leftovers = _by_number(copies.files), _by_number(copies.leftovers)
    wanted = list(keys)
    numbers = {key: at for key in wanted if (at := number_of(key)) is not None}
    files = np.full(max(numbers.values(), default=-1) + 1, -1, np.int32)
    documents: dict[str, int] = {}
    lost: list[str] = []
    loads: Counter[int] = Counter()
    for key in wanted:
        own_number: int | None = numbers.get(key)
        with_it: Sequence[int] = (
            copies.documents.get(key, ()) if own_number is None else by_number.get(own_number, ())
        )
        intact = [n for n in with_it if (n, key) not in damaged]
        if not intact:
            others = leftovers.get(-1 if own_number is None else own_number, ())
            intact = [n for n in (*copies.whole, *others) if (n, key) not in damaged][:1]
        if not intact:
            lost.append(key)
            continue
        if own_number is None:
            documents[key] = intact[0]
            continue
        nearest = near[own_number] if own_number < len(near) else -1
        place = nearest if nearest in intact else min(intact, key=lambda n: (loads[n], n))
        loads[place] += 1
        files[own_number] = place
    return Places(folder, files, documents, copies.whole[0] if copies.whole else -1), lost


def _by_number(files: Iterable[tuple[int, Ranges]]) -> dict[int, list[int]]:
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, ranges in files:
        for number in _numbers(ranges):
            places[number].append(place)
    return places


def _numbers(ranges: Ranges) -> list[int]:
    return [n for start, stop in ranges for n in range(start, stop)]
