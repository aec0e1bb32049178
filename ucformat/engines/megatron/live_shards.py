"""What a rank holds of each tensor of Megatron's, in memory, and how the ranks of its stage hold it together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ucformat.engines.megatron.live_entries import follows, joined_regions
from ucformat.engines.megatron.names import is_expert
from ucformat.errors import UnsupportedError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.distribution import Cut, Distribution, RankMesh
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.local import Dim
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.torch.state.local import LocalShard, pieces_in
from ucformat.torch.state.memory import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.engines.megatron.live_entries import Region
    from ucformat.engines.megatron.live_fsdp import ShardedParameter

    #: The rows of a vocabulary without its padding, by name and the rows that the engine holds.
    Rows = Callable[[str, int], int]

#: The axes of a stage's mesh.
_DP, _TP = 0, 1


class StageLayout:
    """The parallel groups of this rank: the ranks of its stage, as meshes of data-parallel by tensor-parallel ranks.

    Experts have groups of their own. A mesh is None where the groups are not those of
    `parallel_state`, or span no regular grid; tensors are then listed. `is_last_stage` says that the
    output layer is here.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state as ps

        self.rank = dist.get_rank()
        self.dense = self.experts = None
        self.degrees: dict[str, int] = {}
        self.is_last_stage = True
        if ps.model_parallel_is_initialized():
            dense = ps.get_data_parallel_group(with_context_parallel=True)
            self.dense = self._mesh(dense, ps.get_tensor_model_parallel_group())
            experts = ps.get_expert_data_parallel_group()
            self.experts = self._mesh(experts, ps.get_expert_tensor_parallel_group())
            self.is_last_stage = ps.is_pipeline_last_stage(ignore_virtual=True)
            self.degrees = {
                "tp": ps.get_tensor_model_parallel_world_size(),
                "pp": ps.get_pipeline_model_parallel_world_size(),
                "ep": ps.get_expert_model_parallel_world_size(),
                "cp": ps.get_context_parallel_world_size(),
                "dp": ps.get_data_parallel_world_size(),
            }

    def _mesh(self, replicas: Any, parts: Any) -> RankMesh | None:
        """The ranks of a stage, if each group of its grid has the same distances between its ranks."""
        groups = map(dist.get_process_group_ranks, (replicas, parts))
        return RankMesh.crossing(self.rank, *groups)

    def mesh_of(self, name: str) -> RankMesh | None:
        """The mesh of the ranks that hold parts of a parameter."""
        return self.experts if is_expert(name) else self.dense

    def distribution(self, region: Region) -> Distribution | None:
        """How the ranks of this stage hold a tensor of which this rank holds one box; None if that does not follow."""
        mesh = self.mesh_of(region.key.name)
        at = None if mesh is None else mesh.coordinate(self.rank)
        if mesh is None or at is None:
            return None
        parts = mesh.sizes[_TP]
        cuts = [d for d, n in enumerate(region.shape) if region.box.shape[d] != n]
        if len(cuts) > 1 or any(region.box.shape[d] * parts != region.shape[d] for d in cuts):
            return None
        distribution = Distribution(mesh, tuple(Cut(d, _TP) for d in cuts))
        return distribution if distribution.local(region.shape, at) == region.box else None


@dataclass(frozen=True, slots=True)
class LocalBoxes:
    """What this rank holds of a tensor: boxes, each in memory of its shape, in their order."""

    info: TensorInfo
    boxes: tuple[tuple[Box, torch.Tensor], ...]
    distribution: Distribution | None = None

    def shard(self) -> LocalShard:
        """All boxes as one shard; boxes that do not follow each other in memory are copied."""
        if not self.boxes:
            return LocalShard(self.info, (), torch.empty(0), self.distribution)
        if len(self.boxes) == 1:
            ((box, view),) = self.boxes
            return LocalShard(self.info, _pieces(box, view), view, self.distribution)
        views = [view for _, view in self.boxes]
        sizes = [view.numel() for view in views]
        if all(follows(a, b) for a, b in pairwise(views)):
            memory = views[0].as_strided((sum(sizes),), (1,))
        else:
            memory = torch.cat([view.reshape(-1) for view in views])
        pieces = (
            Piece(box, at, row_major(box.shape))
            for (box, _), at in zip(self.boxes, accumulate(sizes, initial=0), strict=False)
        )
        return LocalShard(self.info, tuple(pieces), memory, self.distribution)

    def first_rows(self, count: int) -> LocalBoxes:
        """What this rank holds of the first rows of the tensor."""
        part = _Rows(self.info.key, 0, (count, *self.info.shape[1:]))
        boxes = tuple(pair for b in self.boxes if (pair := part.clip(*b)) is not None)
        return LocalBoxes(replace(self.info, shape=part.shape), boxes)

    def targets(self) -> Iterator[LocalShard]:
        """Each box as a shard of its own, to be filled; one without memory if there are none."""
        if not self.boxes:
            yield self.shard()
        for box, view in self.boxes:
            yield LocalShard(self.info, _pieces(box, view), view)


def _pieces(box: Box, view: torch.Tensor) -> tuple[Piece, ...]:
    starts_and_sizes = zip(box.start, box.shape, strict=True)
    return pieces_in(view, [Dim.whole(n, a) for a, n in starts_and_sizes])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive rows of a tensor that are stored as a tensor of their own: those of a vocabulary, or its padding."""

    key: Key
    first: int
    shape: tuple[int, ...]

    def clip(self, box: Box, view: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        """The part of a box with these rows; None if there is none."""
        if not self.shape:
            return box, view
        low = max(box.start[0], self.first)
        high = min(box.stop[0], self.first + self.shape[0])
        if low >= high:
            return None
        start, shape = (low - self.first, *box.start[1:]), (high - low, *box.shape[1:])
        return Box(start, shape), view.narrow(0, low - box.start[0], high - low)


def _rows_of(key: Key, shape: tuple[int, ...], rows: Rows) -> list[_Rows]:
    kept = rows(key.name, shape[0]) if shape else 0
    if not shape or kept >= shape[0]:
        return [_Rows(key, 0, shape)]
    padding = shape[0] - kept
    return [_Rows(key, 0, (kept, *shape[1:])), _Rows(key.padding, kept, (padding, *shape[1:]))]


def local_weights(
    regions: Iterable[Region], layout: StageLayout, rows: Rows
) -> Iterator[LocalBoxes]:
    """What this rank holds of the tensors of these regions, the padding of a vocabulary apart."""
    by_key: dict[Key, list[Region]] = {}
    for region in regions:
        by_key.setdefault(region.key, []).append(region)
    for key, of_key in by_key.items():
        joined = joined_regions(of_key)
        whole = layout.distribution(joined[0]) if len(joined) == 1 else None
        parts = _rows_of(key, joined[0].shape, rows)
        for part in parts:
            clipped = (part.clip(r.box, r.view) for r in joined)
            boxes = tuple(pair for pair in clipped if pair is not None and pair[0].size)
            d = whole
            if d is not None and len(parts) > 1 and any(cut.dim == 0 for cut in d.cuts):
                # padded rows are cut equally, so those without padding are a range of them
                row = joined[0].box.size // joined[0].box.shape[0]
                d = Distribution(d.mesh, (), _TP, joined[0].box.size, part.first * row)
            info = TensorInfo(*part.key, dtype_name(joined[0].view.dtype), part.shape)
            yield LocalBoxes(info, boxes, d)


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `[start, stop)` of a parameter that this rank's part of a flat bucket holds.

    Attributes:
        parameter: of the model, with its regions.
        part: the elements of each rank's part of the bucket (0: each has all of it).
        position: the element of the bucket at which the parameter begins.
        ranks: those that partition the bucket, in order.
    """

    parameter: torch.Tensor
    regions: Sequence[Region]
    start: int
    stop: int
    part: int
    position: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, sharded: ShardedParameter, regions: Sequence[Region]) -> FlatRange:
        """The range of a parameter under Megatron-FSDP."""
        s = sharded
        return cls(s.stand_in, regions, s.start, s.stop, s.part, s.position, s.ranks)


def local_states(
    flat: FlatRange,
    state: str,
    dtype: torch.dtype,
    memory: torch.Tensor | None,
    layout: StageLayout,
    rows: Rows,
) -> Iterator[LocalBoxes]:
    """What this rank holds of a state of a parameter, in flat memory of its range (None: the range is empty)."""
    by_key: dict[Key, list[Region]] = {}
    for region in flat.regions:
        by_key.setdefault(region.key._replace(state=state), []).append(region)
    for key, of_key in by_key.items():
        joined = joined_regions(of_key)
        boxes = [pair for r in joined for pair in _in_range(flat, r, memory)]
        whole = layout.distribution(joined[0]) if len(joined) == 1 else None
        if whole is not None and flat.part and not _partitions(whole.mesh, flat.ranks, layout.rank):
            whole = None
        parts = _rows_of(key, joined[0].shape, rows)
        for part in parts:
            clipped = (part.clip(*pair) for pair in boxes)
            own = tuple(pair for pair in clipped if pair is not None)
            d = whole
            if d is not None and len(parts) > 1 and any(cut.dim == 0 for cut in d.cuts):
                d = None  # a range of a range, which no description has
            if d is not None and flat.part:
                box = joined[0].box
                begin = _begin(flat, joined[0])
                row = box.size // box.shape[0] if box.shape and box.shape[0] else 0
                at = flat.position + begin + part.first * row
                d = replace(d, flat=_DP, part=flat.part, position=at)
            yield LocalBoxes(TensorInfo(*part.key, dtype_name(dtype), part.shape), own, d)


def _begin(flat: FlatRange, region: Region) -> int:
    """The element of a parameter's memory at which a region begins, which must be contiguous there."""
    begin: int = region.view.storage_offset() - flat.parameter.storage_offset()
    if not region.view.is_contiguous() or begin < 0:
        raise UnsupportedError(
            f"{region.key.name} is not contiguous in the parameter that the distributed optimizer "
            "partitions",
            hint="save the model alone, or report this model",
        )
    return begin


def _in_range(
    flat: FlatRange, region: Region, memory: torch.Tensor | None
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a region in the range, and their memory."""
    begin, size = _begin(flat, region), region.box.size
    first, last = max(flat.start, begin), min(flat.stop, begin + size)
    if memory is None or first >= last:
        return
    at = first - flat.start
    for box in flat_boxes(region.box.shape, first - begin, last - begin):
        yield box.shift(region.box.start), memory[at : at + box.size].view(box.shape)
        at += box.size


def _partitions(mesh: RankMesh, ranks: tuple[int, ...], rank: int) -> bool:
    """Whether these are the ranks along the data-parallel axis of a mesh."""
    at = mesh.coordinate(rank)
    return at is not None and tuple(mesh.ranks[:, at[_TP]].tolist()) == ranks
