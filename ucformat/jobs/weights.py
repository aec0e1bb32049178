"""The files that a conversion writes beside arrays, of weights and of small tensors, as tasks, with their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ucformat.errors import UsageError
from ucformat.exporters.base import weights_of
from ucformat.format.digest import document_digest
from ucformat.format.extents import put_sidecar
from ucformat.format.sidecar import encode_columns
from ucformat.format.small import packed_keys
from ucformat.jobs.export_files import FilesJob
from ucformat.jobs.reopen import spec_of
from ucformat.jobs.shards import How, plan_document, planned_of
from ucformat.jobs.weight_files import PlacedFiles, WeightFiles, small_files, weights_folder
from ucformat.schema.manifest import SidecarDoc, VerifiedDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.strided import checksum
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.jobs.finished import TaskDoc
    from ucformat.storage.base import Store

_CRC_BYTES = 4


def plan_files(
    source: Checkpoint, infos: Sequence[TensorInfo], attempt: str, weights: str | None
) -> PlacedFiles | None:
    """Plan the files of a conversion that are no arrays; None if there are none."""
    if weights is None:
        packed = packed_keys(infos)
        return PlacedFiles(small_files([i for i in infos if i.key in packed], attempt)) if packed else None
    chosen = weights_of(infos)
    if not chosen:
        raise UsageError(
            f"{source.url}: no weights are to be converted, and so there are none for safetensors files",
            hint="leave out the weights option, or convert the state weight or master too",
        )
    held = {info.key for info in chosen}
    others = [info for info in infos if info.key not in held]
    packed = packed_keys(others)
    folder = weights_folder(attempt, {info.state for info in others if info.key not in packed})
    small = small_files([info for info in others if info.key in packed], attempt)
    return WeightFiles(chosen, source.aliases, folder, source.metadata.part_of, small)


class WeightsJob(FilesJob):
    """Writes the files of a universal checkpoint that are no arrays, the large ones first."""

    kind = "convert"

    def __init__(
        self,
        source: Checkpoint,
        store: Store,
        attempt: str,
        infos: Sequence[TensorInfo],
        files: PlacedFiles,
        how: How,
        weights: str | None = "safetensors",
    ) -> None:
        self.attempt, self.infos, self.placed, self.how, self._weights = attempt, infos, files, how, weights
        self._order = sorted(range(len(files.files)), key=lambda n: -files.files[n].nbytes)
        self._crcs = np.zeros(files.count, np.uint32)
        self._bare: set[Key] = set()
        super().__init__(source, store, [files.files[n] for n in self._order], verify=how.verify)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {
            "job": "weights:WeightsJob",
            "source": spec_of(self.source),
            "store": self.store.url,
            "attempt": self.attempt,
            "tensors": [tuple(i.key) for i in self.infos],
            "verify": self.input.verify,
            "plan": document_digest(plan_document(self.source, self.infos, self.how)),
            "grids": (self.how.chunk_bytes, self.how.shard_bytes),
            "weights": self._weights,
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source, infos, how = planned_of(spec)
        weights = spec["weights"]
        files = plan_files(source, infos, spec["attempt"], weights)
        assert files is not None  # noqa: S101 - there is a job for them
        return cls(source, open_store(spec["store"]), spec["attempt"], infos, files, how, weights)

    def write_task(self, task: int) -> tuple[bool, bytes]:
        """See FilesJob."""
        sums = _BlockSums(self.placed.block_sizes(self._order[task]).tolist())
        bare = self.write(self.files[task], sums.take)
        return bare, np.array(sums.done, "<u4").tobytes()

    def take_crcs(self, task: TaskDoc) -> None:
        """See FilesJob."""
        number = self._order[task.task]
        blocks, found = self.placed.numbers(number), np.frombuffer(bytes.fromhex(task.crcs), "<u4")
        if len(found) != len(blocks):  # a record of something else: the file is written again
            self.finished.discard(task.task)
            return
        self._crcs[blocks.start : blocks.stop] = found
        if task.bare:
            self._bare.update(key for key, placed in self.placed.tensors.items() if placed.file == number)

    def finish(self) -> VerifiedDoc:
        """Complete the checksums of the source; call it when all tasks are finished.

        Raises:
            Conflict: a file of the source has changed.
        """
        self.check_source()
        infos = [placed.info for placed in self.placed.tensors.values()]
        verifier = self.input.verifier
        return VerifiedDoc(default=False) if verifier is None else verifier.described(infos, self._bare)

    def put_sidecar(self) -> SidecarDoc:
        """Write the sidecar, with the extents of the tensors in the files; call it when all tasks are finished."""
        number = {info.key: n for n, info in enumerate(self.infos)}
        data = encode_columns(*self.placed.columns(number, self._crcs))
        tensors = TensorTable.of(TensorDoc(i.name, i.state, i.dtype, i.shape) for i in self.infos)
        return put_sidecar(self.store, f"data/{self.attempt}", data, tensors)


class _BlockSums:
    """The CRC-32C of each block of a file, which is taken from beginning to end."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._left, self._crc = sizes[0] if sizes else 0, 0
        self.done: list[int] = []

    def take(self, data: memoryview) -> None:
        data = data.cast("B")
        while data:
            part, data = data[: self._left], data[self._left :]
            self._crc = checksum(part, self._crc)
            self._left -= len(part)
            if not self._left:
                self.done.append(self._crc)
                self._crc = 0
                self._left = self._sizes[len(self.done)] if len(self.done) < len(self._sizes) else 0
