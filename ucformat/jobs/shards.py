"""The shards of the arrays that a conversion writes, as tasks."""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, cast

from ucformat._version import __version__
from ucformat.errors import NotFound, UsageError, check_choice
from ucformat.format.arrays import array_doc, lay_out, shard_key
from ucformat.format.digest import document_digest, shard_digests_nbytes
from ucformat.format.lossy_states import check_encode
from ucformat.format.shard import check_shard, write_shard
from ucformat.geometry.tensor import Key
from ucformat.jobs.finished import FinishedDoc, SumPart, TaskDoc
from ucformat.jobs.inputs import Input, InputsJob
from ucformat.jobs.reopen import content_of, other_found, reopen, spec_of
from ucformat.jobs.run import run, workers_for
from ucformat.jobs.tasks import job_name
from ucformat.jobs.where import HERE, Where
from ucformat.schema.manifest import VerifiedDoc
from ucformat.schema.tensors import BLOSC
from ucformat.storage.base import FileWriter
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.arrays import StoredArray
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Piece, TensorInfo
    from ucformat.jobs.inputs import InputBox
    from ucformat.schema.tensors import TensorDoc
    from ucformat.storage.base import Bytes, Store


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options for writing arrays, with the meaning and the defaults of the parameters of `convert`."""

    chunk_bytes: int | None = None
    shard_bytes: int | None = None
    workers: int | None = None
    progress: Callable[[int, int], None] | None = None
    verify: bool = True
    where: Where = HERE
    codec: str | None = None
    encode: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_encode(self.encode)
        check_choice("verify", self.verify, (True, False))
        check_choice("codec", self.codec, (None, BLOSC))
        for option in ("chunk_bytes", "shard_bytes", "workers"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, not {value}")


def plan_document(
    source: Checkpoint, infos: Sequence[TensorInfo], options: WriteOptions
) -> dict[str, Any]:
    """The plan of a conversion, which identifies it: the source's files as they are now, the tensors and the grids."""
    return {
        "convert": source.store.url,
        **content_of(source, infos),
        "grids": (options.chunk_bytes, options.shard_bytes),
        "writer": __version__,
        **({"codec": options.codec} if options.codec else {}),
        **({"encode": dict(options.encode)} if options.encode else {}),
    } | ({} if options.verify else {"verify": False})


def plan_spec(
    source: Checkpoint,
    store: Store,
    attempt: str,
    infos: Sequence[TensorInfo],
    options: WriteOptions,
) -> dict[str, Any]:
    """What another process needs to make a job of a conversion, as JSON values."""
    return {
        "source": spec_of(source),
        "store": store.url,
        "attempt": attempt,
        "tensors": [tuple(i.key) for i in infos],
        "grids": (options.chunk_bytes, options.shard_bytes),
        "verify": options.verify,
        "codec": options.codec,
        "encode": dict(options.encode),
        "plan": document_digest(plan_document(source, infos, options)),
    }


def planned_of(spec: Mapping[str, Any]) -> tuple[Checkpoint, list[TensorInfo], WriteOptions]:
    """The source, the tensors and the options of a conversion, in another process.

    Raises:
        Conflict: this process sees other files.
    """
    source = reopen(spec["source"])
    infos = [source.tensors[Key(*key)] for key in spec["tensors"]]
    chunk_bytes, shard_bytes = spec["grids"]
    options = WriteOptions(chunk_bytes, shard_bytes, verify=spec["verify"], codec=spec["codec"])
    options = replace(options, encode=spec["encode"])
    if document_digest(plan_document(source, infos, options)) != spec["plan"]:
        raise other_found(source)
    return source, infos, options


#: In the place of the name of an attempt, of a job that writes nothing.
NO_ATTEMPT = "0" * 20


class ShardJob(InputsJob):
    """Writes the shards of arrays, the large ones first.

    Intact shards of an interrupted run of the same attempt are kept, without reading them if they
    are recorded.

    Args:
        compared: the keys of source files that are compared as a whole otherwise (default: none).
    """

    kind = "convert"

    def __init__(
        self,
        source: Checkpoint,
        store: Store,
        attempt: str,
        infos: Sequence[TensorInfo],
        options: WriteOptions,
        compared: Collection[str] = (),
    ) -> None:
        self.source = source
        self.store = store
        self.attempt = attempt
        self.infos = infos
        self.options = options
        self.arrays = lay_out(
            infos,
            f"data/{attempt}",
            options.chunk_bytes,
            options.shard_bytes,
            codec=options.codec,
        )
        self._large = sorted(self.arrays, key=lambda a: -_nbytes(a, (0,) * len(a.grid.shape)))
        self._ends = list(accumulate(a.grid.count for a in self._large))
        self.count = self._ends[-1] if self._ends else 0
        self.finished = set()
        self._digests: dict[Key, dict[tuple[int, ...], bytes]] = {
            a.info.key: {} for a in self.arrays
        }
        self._bare: set[Key] = set()
        self._compared = tuple(compared)
        self.inputs = [
            Input(checkpoint, compared, verify=options.verify) for checkpoint in self.sources
        ]

    @property
    def sources(self) -> Sequence[Checkpoint]:
        """The checkpoints that are read; all but tensors comes from the first."""
        return (self.source,)

    def shard(self, task: int) -> tuple[StoredArray, tuple[int, ...]]:
        """The array and the coordinates of a task's shard."""
        n = bisect_right(self._ends, task)
        array = self._large[n]
        return array, array.grid.shard_at(task - (self._ends[n - 1] if n else 0))

    def nbytes(self, task: int) -> int:
        """See Job."""
        return _nbytes(*self.shard(task))

    @property
    def total(self) -> int:
        """See Job."""
        return sum(i.nbytes for i in self.infos)

    def spec(self) -> dict[str, Any]:
        """See Job."""
        plan = plan_spec(self.source, self.store, self.attempt, self.infos, self.options)
        return {"job": job_name(self), "compared": self._compared, **plan}

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        source, infos, options = planned_of(spec)
        return cls(
            source, open_store(spec["store"]), spec["attempt"], infos, options, spec["compared"]
        )

    def run(self, task: int) -> tuple[TaskDoc, Sequence[Sequence[SumPart]]]:
        """See Job."""
        array, shard = self.shard(task)
        key = shard_key(array.path, shard)
        with ExitStack() as noting:
            sums = [noting.enter_context(input_.task()) for input_ in self.inputs]
            digests, bare = self._write(array, shard, key)
        return TaskDoc.of(task, self.store.info(key), digests, bare=bare), sums

    def boxes(self, array: StoredArray, box: Box) -> Sequence[InputBox]:
        """What is read for a box of an array."""
        return [self.inputs[0].within(array.info, box)]

    def times_read(self, array: StoredArray) -> int:  # noqa: ARG002
        """How often `boxes` are read."""
        return 1

    def fill(
        self,
        array: StoredArray,  # noqa: ARG002
        boxes: Sequence[InputBox],
        piece: Piece,
        raw: NDArray[np.uint8],
    ) -> bool:
        """Fill memory with the elements of a piece of an array."""
        (only,) = boxes
        return only.read(piece, raw)

    def fingerprints(self) -> dict[Key, str | None]:
        """The fingerprints of the arrays: everything is read and computed, and nothing is written."""

        def digests_of(task: int) -> bytes:
            array, shard = self.shard(task)
            boxes = self.boxes(array, array.grid.box(shard))

            def fill(piece: Piece, raw: NDArray[np.uint8]) -> None:
                self.fill(array, boxes, piece, raw)

            return write_shard(cast("Store", _NullWriter()), "", array.grid, shard, fill)

        for task, digests in run(digests_of, range(self.count), self.options.workers):
            array, shard = self.shard(task)
            self._digests[array.info.key][shard] = digests
        return {
            a.info.key: array_doc(a, self._digests[a.info.key]).fingerprint for a in self.arrays
        }

    def _write(self, array: StoredArray, shard: tuple[int, ...], key: str) -> tuple[bytes, bool]:
        """Write a shard, unless it is there; returns its digests, and whether bytes have no checksum."""
        grid = array.grid
        boxes = self.boxes(array, grid.box(shard))
        bare = False

        def fill(piece: Piece, raw: NDArray[np.uint8]) -> None:
            nonlocal bare
            bare |= not self.fill(array, boxes, piece, raw)

        kept = self._kept(array, shard, key)
        if kept is not None:  # written by this plan before it was interrupted
            again = any(box.carries for box in boxes)
            if not again:
                bare = not all([box.expect() for box in boxes])  # noqa: C419 - of each
            # If the source has checksums, its bytes are read again: a checksum covers more bytes
            # than those of a shard.
            if (
                not again
                or write_shard(cast("Store", _NullWriter()), key, grid, shard, fill) == kept
            ):
                self.store.adopt(key)
                return kept, bare
        return write_shard(self.store, key, grid, shard, fill, array.codec), bare

    def _kept(self, array: StoredArray, shard: tuple[int, ...], key: str) -> bytes | None:
        """The digests of a shard if its file exists and is intact."""
        try:
            digests, problems = check_shard(self.store, key, array.grid, shard, codec=array.codec)
        except NotFound:
            return None
        return None if problems else digests

    def take_finished(self, doc: FinishedDoc, *, resumed: bool = False) -> None:  # noqa: ARG002 - see RecordedJob
        """See RecordedJob."""
        self.parts = max(self.parts, doc.parts)
        for task in doc.tasks:
            if task.task in self.finished or task.task >= self.count:
                continue
            array, shard = self.shard(task.task)
            digests = bytes.fromhex(task.digests)
            expected = shard_digests_nbytes(math.prod(array.grid.tiles(shard, "").grid))
            if task.file == shard_key(array.path, shard) and len(digests) == expected:
                self._digests[array.info.key][shard] = digests
                self.finished.add(task.task)
                if task.bare:
                    self._bare.add(array.info.key)
        self.take_sums(doc)

    def finish(self) -> tuple[tuple[TensorDoc, ...], VerifiedDoc]:
        """Complete the checksums of the source of which parts were read; call it when all tasks are finished.

        Returns:
            The arrays for the manifest, and which of them were verified.
        """
        verifiers = [input_.verifier for input_ in self.inputs if input_.verifier is not None]
        for verifier in verifiers:
            verifier.complete(
                self.options.workers or workers_for(*(source.store for source in self.sources))
            )
        verified = VerifiedDoc(default=False)
        if len(verifiers) == len(self.inputs):
            besides = sum(verifier.besides for verifier in verifiers)
            verified = (
                verifiers[0]
                .described(self.infos, self._bare)
                .model_copy(update={"besides": besides})
            )
        return tuple(array_doc(a, self._digests[a.info.key]) for a in self.arrays), verified


def _nbytes(array: StoredArray, shard: tuple[int, ...]) -> int:
    """The bytes of a shard's elements."""
    return array.grid.box(shard).size * array.info.itemsize


class _NullWriter(FileWriter):
    """A store that discards what is written."""

    def create(self, key: str, unit: int = 1) -> FileWriter:  # noqa: ARG002 - see Store
        return self

    def write(self, data: Bytes) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
