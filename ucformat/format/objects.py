"""Files of non-tensor values: one of those that all ranks share, and those with the values of each rank.

The latter have a range for each of some consecutive ranks, and an index at their end (docs/spec/format.md,
"Objects"). A rank reads the index of the file that has its range, and the range; a file is read
whole only to get the values of many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ucformat.errors import IntegrityError
from ucformat.format.arrays import put_file
from ucformat.format.digest import check_values, unwritable
from ucformat.format.universal import json_object
from ucformat.schema.manifest import RangesDoc
from ucformat.schema.values import dumps
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from ucformat.format.universal import Universal
    from ucformat.schema.manifest import FileDoc, PerRankDoc
    from ucformat.storage.base import Store

_CRC = 4  # bytes of a checksum, after each range and after the index


def put_objects(store: Store, folder: str, objects: Mapping[str, Any]) -> FileDoc:
    """Write the non-tensor values that all ranks share."""
    return put_file(store, f"{folder}/objects.json", _checked(objects, indent=1))


def encode_range(values: Mapping[str, Any]) -> bytes:
    """Encode the values that a rank has as its own, as its range of a file."""
    return _sealed(_checked(values))


def _checked(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """The JSON of values, after the checks of a reader."""
    check_values(values, "an object")
    data = dumps(dict(values), indent).encode()
    try:
        json_object(data, "it")
    except IntegrityError as error:
        raise unwritable("a file of objects", error.message) from error
    return data


def put_ranges(store: Store, folder: str, first: int, ranges: Sequence[bytes]) -> RangesDoc:
    """Write the values of consecutive ranks."""
    index = np.empty((len(ranges), 2), "<u8")
    index[:, 1] = sizes = np.array([len(r) for r in ranges], "<u8")
    index[:, 0] = np.cumsum(sizes) - sizes
    file = put_file(store, _key(folder, first), b"".join([*ranges, _sealed(index.tobytes())]))
    return RangesDoc(**file.model_dump(), first=first, ranks=len(ranges))


def copy_per_rank(source: Universal | None, store: Store, folder: str) -> PerRankDoc | None:
    """Copy the files with the values of each rank from another checkpoint, after comparing them with their digests."""
    if source is None or source.manifest.per_rank is None:
        return None
    doc = source.manifest.per_rank
    files = []
    for file in doc.files:
        copied = put_file(store, _key(folder, file.first), source.read_file(file))
        files.append(file.model_copy(update={"path": copied.path}))
    return doc.model_copy(update={"files": tuple(files)})


def _key(folder: str, first: int) -> str:
    return f"{folder}/per_rank-{first:05}.bin"


def _sealed(data: bytes) -> bytes:
    return data + checksum(data).to_bytes(_CRC, "little")


class PerRankValues(Mapping[str, Sequence[Any]]):
    """The values of all ranks in JSON form, by name: `values[name][rank]` reads no more than the values of a rank."""

    def __init__(self, source: Universal, doc: PerRankDoc) -> None:
        self._doc = doc
        names = frozenset(doc.names)
        self._files = [_RankFile(source, file, names) for file in doc.files]

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name not in self._doc.names:
            raise KeyError(name)
        return _OfName(self, name, self._doc.ranks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._doc.names)

    def __len__(self) -> int:
        return len(self._doc.names)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Read the values of a rank, by name; a name that it lacks has none."""
        return self._file_of(rank).of_rank(rank)

    def read(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Read the values of several ranks, and check the digests of the files that have them."""
        files = [*map(self._file_of, ranks)]
        for file in dict.fromkeys(files):
            file.read_all()
        return [file.of_rank(rank) for file, rank in zip(files, ranks, strict=True)]

    def _file_of(self, rank: int) -> _RankFile:
        return self._files[bisect_right(self._files, rank, key=attrgetter("doc.first")) - 1]


class _RankFile:
    """A file with the values of consecutive ranks."""

    def __init__(self, source: Universal, doc: RangesDoc, names: frozenset[str]) -> None:
        self._source, self.doc, self._names = source, doc, names
        # of the last range; positive, because the manifest was checked
        self._end = doc.nbytes - 16 * doc.ranks - _CRC
        self._by_rank: dict[int, dict[str, Any]] = {}

    def of_rank(self, rank: int) -> dict[str, Any]:
        """The values of a rank."""
        if rank not in self._by_rank:
            number = rank - self.doc.first
            begin, end = self._bounds[number : number + 2]
            self._by_rank[rank] = self._decoded(
                self._source.read_range(self.doc, begin, end - begin)
            )
        return self._by_rank[rank]

    def read_all(self) -> None:
        """Read the values of all its ranks, and check the digest of the file."""
        if len(self._by_rank) < self.doc.ranks:
            data = self._source.read_file(self.doc)
            parts = (data[begin:end] for begin, end in pairwise(self._indexed(data[self._end :])))
            self._by_rank = dict(enumerate(map(self._decoded, parts), self.doc.first))

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the range of each rank begins, and the last one ends."""
        return self._indexed(
            self._source.read_range(self.doc, self._end, self.doc.nbytes - self._end)
        )

    def _indexed(self, data: bytes) -> list[int]:
        index = np.frombuffer(self._checked(data), "<u8").reshape(-1, 2)
        bounds = [0, *np.cumsum(index[:, 1], dtype="<u8").tolist()]
        if (
            not np.array_equal(index[:, 0], bounds[:-1])
            or bounds != sorted(bounds)
            or bounds[-1] != self._end
        ):
            raise self._damaged("has an index with gaps or overlaps")
        return bounds

    def _checked(self, data: bytes) -> bytes:
        if data[-_CRC:] != checksum(data[:-_CRC]).to_bytes(_CRC, "little"):
            raise self._damaged("differs from its checksum")
        return data[:-_CRC]

    def _decoded(self, data: bytes) -> dict[str, Any]:
        values = json_object(self._checked(data), f"{self._source.store.url}/{self.doc.path}")
        if not values.keys() <= self._names:
            raise self._damaged("has values that the manifest does not name")
        return values

    def _damaged(self, fault: str) -> IntegrityError:
        return IntegrityError(
            f"{self._source.store.url}/{self.doc.path}, with the values of each rank, {fault}",
            hint="restore it from another copy of the checkpoint",
        )


class _OfName(Sequence[Any]):
    """The value of each rank under one name; None of a rank that has none."""

    def __init__(self, values: PerRankValues, name: str, ranks: int) -> None:
        self._values, self._name, self._ranks = values, name, ranks

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        ranks = range(self._ranks)[index]
        if isinstance(ranks, int):
            return self._values.of_rank(ranks).get(self._name)
        return [values.get(self._name) for values in self._values.read(ranks)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        return self._ranks
