"""The safetensors shards of DCP's `HuggingFaceStorageWriter(save_distributed=True)`.

Each rank writes `shard-RRRRR-model-FFFFF-of-NNNNN.safetensors` with its pieces of the tensors, and
the offset of each piece in the whole tensor in `__metadata__`, as `DCP_SHARDING_INFO`. Neither the
shape of a tensor is recorded, which ends with its last piece, nor the number of ranks. That no file
of a last rank is missing is proved by tensors whose last piece is shorter: n rows over r ranks are
pieces of ceil(n / r). Otherwise the caller must say so.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData
from ucformat.geometry.box import Box
from ucformat.geometry.coverage import prove
from ucformat.geometry.tensor import Extent, Key, TensorInfo
from ucformat.reading.readable import CheckpointMetadata
from ucformat.sources.distcp import SHARD
from ucformat.sources.index import IndexedSource, TensorIndex
from ucformat.sources.safetensors import SHARDING_INFO, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.sources.safetensors import Header
    from ucformat.storage.base import Store


class OpenShards(IndexedSource):
    """The opened shards of a folder."""

    kind = "dcp"
    part: str | None = None

    def __init__(self, store: Store) -> None:
        self.store = store
        files = sorted(info.key for info in store.list() if SHARD.fullmatch(info.key))
        self._check_files(files)
        pieces: dict[str, list[tuple[Box, str, Extent | None]]] = {}
        dtypes: dict[str, str] = {}
        version = ""
        self.contents = TensorIndex()
        for file in files:
            header = read_header(store, file)
            offsets = _offsets(header)
            version = header.metadata.get("DCP_VERSION", version)
            self.contents.unreadable |= {
                Key(name, "weight"): why for name, why in header.unreadable.items()
            }
            for name, stored in header.tensors.items():
                start = offsets.get(name)
                if start is None or len(start) != len(stored.shape):
                    raise IntegrityError(
                        f"{file} does not say at which offsets its piece of {name} begins"
                    )
                if dtypes.setdefault(name, stored.dtype) != stored.dtype:
                    raise IntegrityError(
                        f"{file} has {name} as {stored.dtype}, another file as {dtypes[name]}"
                    )
                whole = next(iter(header.extents(name)), None)
                extent = whole and Extent(whole.box.shift(start), file, whole.offset, whole.strides)
                pieces.setdefault(name, []).append((Box(start, stored.shape), file, extent))
        ranks = len({match[1] for file in files if (match := SHARD.fullmatch(file))})
        boxes = [[box for box, _, _ in placed] for placed in pieces.values()]
        if not _all_there(boxes, ranks):
            saved_by = "one rank" if ranks == 1 else f"{ranks} ranks"
            self.part = f"the shards of {saved_by}, and nothing tells how many saved"
        for name, placed in pieces.items():
            if Key(name, "weight") not in self.contents.unreadable:
                self._add(name, dtypes[name], placed)
        self.metadata = CheckpointMetadata(
            tensor_list=self.contents.tensor_list(),
            unreadable=self.contents.unreadable,
            engine={
                "name": "torch.distributed.checkpoint",
                "version": version,
                "format": "safetensors",
            },
            files=tuple(files),
        )

    def _check_files(self, files: list[str]) -> None:
        """Check that ranks count from 1 without a gap, and all shards are of one save."""
        matches = [m for f in files if (m := SHARD.fullmatch(f))]
        ranks = {int(m[1]) for m in matches}
        totals = {m[3] for m in matches}
        missing = next((r for r in range(1, len(ranks) + 1) if r not in ranks), None)
        if missing is not None:
            raise MissingData(
                f"{self.store.url} has shards of {len(ranks)} ranks up to {max(ranks)}, but none "
                f"of rank {missing}",
                hint="copy the files of all ranks; each contains other pieces",
            )
        if len(totals) != 1:
            raise IntegrityError(
                f"{self.store.url} has shards of several checkpoints: of "
                f"{', '.join(sorted(totals))}"
            )
        numbers, total = {int(m[2]) for m in matches}, int(totals.pop())
        lost = next(
            (n for n in range(1, min(total, len(numbers) + 1) + 1) if n not in numbers), None
        )
        if lost is not None:
            raise MissingData(
                f"{self.store.url} has no shard-…-model-{lost:05}-of-{total:05}.safetensors of "
                "any rank",
                hint="copy the files of all ranks; each contains other pieces",
            )

    def _add(self, name: str, dtype: str, pieces: list[tuple[Box, str, Extent | None]]) -> None:
        shape = tuple(map(max, zip(*(box.stop for box, _, _ in pieces), strict=True)))
        info = TensorInfo(name, "weight", dtype, shape)
        extents = {box: extent for box, _, extent in pieces if extent is not None}
        prove(info, [(file, box) for box, file, _ in pieces])
        self.contents.add(name, "weight", dtype, shape, lambda _: iter(extents.values()))


def _all_there(tensors: Iterable[Sequence[Box]], ranks: int) -> bool:
    """Whether shorter last pieces of some tensors prove that no more ranks saved."""
    most = math.inf
    for boxes in tensors:
        pieces = sorted(boxes, key=lambda box: box.start)
        first, last = pieces[0], pieces[-1]
        cut = [d for d, start in enumerate(last.start) if start]
        if len(cut) != 1 or not first.size or len(pieces) != ranks:
            continue
        (dim,) = cut
        size, rows = first.shape[dim], last.stop[dim]
        if last.shape[dim] < size and [p.start[dim] for p in pieces] == list(range(0, rows, size)):
            # the most ranks r for which ceil(rows / r) is `size`
            most = min(most, (rows - 1) // (size - 1))
    return most <= ranks


def _offsets(header: Header) -> dict[str, tuple[int, ...]]:
    """The offset of each piece of a file in its tensor."""
    try:
        document: Any = json.loads(header.metadata.get(SHARDING_INFO, ""))
        starts = {name: tuple(entry["saved_offsets"]) for name, entry in document.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"{header.file}: its {SHARDING_INFO} cannot be read ({type(error).__name__})"
        ) from error
    if not all(type(n) is int and 0 <= n < 1 << 62 for start in starts.values() for n in start):
        raise IntegrityError(f"{header.file}: its {SHARDING_INFO} has impossible offsets")
    return starts
