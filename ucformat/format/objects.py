"""Files of non-tensor values: one of those that all ranks share, and one of those that each rank has as its own.

The latter has a range for each rank, and an index at its end (docs/spec.md, "Objects"). A rank reads the index and its
own range; the file is read whole only to get the values of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ucformat.errors import IntegrityError
from ucformat.format.arrays import put_file
from ucformat.format.universal import json_object
from ucformat.schema.manifest import PerRankDoc
from ucformat.schema.values import dumps
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from ucformat.format.universal import Universal
    from ucformat.storage.base import Store

__all__ = ["PerRankValues", "put_objects"]

_CRC = 4  # bytes of a checksum, after each range and after the index


def put_objects(
    store: Store, folder: str, objects: Mapping[str, Any], per_rank: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Write the non-tensor values of a checkpoint.

    Args:
        store: the store to write to.
        folder: the folder of the checkpoint's objects.
        objects: the values that all ranks share, in JSON form, by name.
        per_rank: those that each rank has as its own, by name: each a value for every rank.

    Returns:
        The entries of the files in the manifest, by the names that they have there.
    """
    shared = put_file(store, f"{folder}/objects.json", dumps(dict(objects), indent=1).encode())
    return {"objects": shared, "per_rank": _put_per_rank(store, folder, per_rank) if per_rank else None}


def _put_per_rank(store: Store, folder: str, values: Mapping[str, Sequence[Any]]) -> PerRankDoc:
    ranges = [dumps(dict(zip(values, of_rank, strict=True))).encode() for of_rank in zip(*values.values(), strict=True)]
    index = np.empty((len(ranges), 2), "<u8")
    index[:, 1] = sizes = np.array([len(r) + _CRC for r in ranges], "<u8")
    index[:, 0] = np.cumsum(sizes) - sizes
    file = put_file(store, f"{folder}/per_rank.bin", b"".join(map(_sealed, [*ranges, index.tobytes()])))
    return PerRankDoc(path=file.path, nbytes=file.nbytes, digest=file.digest, ranks=len(ranges), names=tuple(values))


def _sealed(data: bytes) -> bytes:
    return data + checksum(data).to_bytes(_CRC, "little")


class PerRankValues(Mapping[str, Sequence[Any]]):
    """The values of all ranks in JSON form, by name: `values[name][rank]` reads no more than the values of a rank."""

    def __init__(self, source: Universal, doc: PerRankDoc) -> None:
        self._source, self._doc = source, doc
        self._known: dict[int, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name not in self._doc.names:
            raise KeyError(name)
        return _OfName(self, name, self._doc.ranks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._doc.names)

    def __len__(self) -> int:
        return len(self._doc.names)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Read the values of a rank, by name.

        Args:
            rank: its number, from 0.

        Raises:
            MissingData: the file is missing.
            IntegrityError: it is damaged.
        """
        if rank not in self._known:
            begin, end = self._bounds[rank : rank + 2]
            self._known[rank] = self._decoded(self._source.read_range(self._doc, begin, end - begin))
        return self._known[rank]

    def read_all(self) -> None:
        """Read the values of all ranks, and check the digest of the file.

        Raises:
            MissingData: the file is missing.
            IntegrityError: it is damaged.
        """
        if len(self._known) < self._doc.ranks:
            data, bounds = self._source.read_file(self._doc), self._bounds
            each = (data[begin:end] for begin, end in pairwise(bounds))
            self._known = dict(enumerate(map(self._decoded, each)))

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the range of each rank begins, and the last one ends."""
        nbytes = 16 * self._doc.ranks + _CRC
        end = self._doc.nbytes - nbytes
        if end < 0:
            raise self._damaged("is too small for its index")
        index = np.frombuffer(self._checked(self._source.read_range(self._doc, end, nbytes)), "<u8").reshape(-1, 2)
        stops = np.cumsum(index[:, 1], dtype="<u8")
        bounds = [0, *stops.tolist()]
        if not np.array_equal(index[:, 0], bounds[:-1]) or bounds != sorted(bounds) or bounds[-1] != end:
            raise self._damaged("has an index with gaps or overlaps")
        return bounds

    def _checked(self, data: bytes) -> bytes:
        if data[-_CRC:] != checksum(data[:-_CRC]).to_bytes(_CRC, "little"):
            raise self._damaged("differs from its checksum")
        return data[:-_CRC]

    def _decoded(self, data: bytes) -> dict[str, Any]:
        found = json_object(self._checked(data), f"{self._source.store.url}/{self._doc.path}")
        if not found.keys() >= set(self._doc.names):
            raise self._damaged("lacks values that the manifest names")
        return found

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(
            f"{self._source.store.url}/{self._doc.path}, with the values of each rank, {what}",
            hint="restore it from another copy of the checkpoint",
        )


class _OfName(Sequence[Any]):
    """The value of each rank under one name."""

    def __init__(self, values: PerRankValues, name: str, ranks: int) -> None:
        self._values, self._name, self._ranks = values, name, ranks

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        ranks = range(self._ranks)[index]
        if isinstance(ranks, int):
            return self._values.of_rank(ranks)[self._name]
        self._values.read_all()
        return [self._values.of_rank(rank)[self._name] for rank in ranks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        return self._ranks
