"""The optimizer's format `dp_reshardable`: unnamed flat buckets, one set for each rank of a data-parallel group.

`optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_K.<state>`: G counts
tensor-parallel ranks within pipeline stages (for experts: expert-tensor ranks, within
expert-parallel ones, within stages); B counts the buffers of a rank's model chunks, K their
buckets. The chunks that DCP lists begin and end where parameters do.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ucformat.engines.megatron.names import LAYER, is_expert, orders_of
from ucformat.engines.megatron.stacked import StackedTensor, add_tensor, joined, unstacked
from ucformat.errors import AmbiguousLayout, IntegrityError, option_text
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import align_up, flat_boxes, flat_extents, flat_range
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.view import BoxPair, View
from ucformat.reading.stand_ins import why_refused
from ucformat.schema import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.engines.megatron.names import Bucket
    from ucformat.engines.megatron.stacked import Opened, ReadableTensor
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.distcp.metadata import Items
    from ucformat.storage.base import Store


# The offsets of parameters in the flat buffers of Megatron's distributed optimizer, and their
# proof.
#
# The buffers of one rank's model hold its parameters in the reverse order of the module, each
# aligned to 64 elements; a buffer is split into buckets between parameters. The files do not name
# them. They are placed by that rule, which must fill every bucket exactly; and as the fp32 copy in
# the buffer rounds to the weight itself, the first and last elements of each parameter prove its
# slot when it is read (or at once, if some parameters are frozen or the module may have several
# orders).


_ALIGN = (64, 1)  # elements; older versions did not align
_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor in files; `locate` gives the extents of a range of it, as boxes of one dim."""

    size: int
    dtype: str
    locate: Callable[[int, int], Iterable[Extent]]


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of one rank's model, with its shape and its weight's extents there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    weight: Callable[[], Iterable[Extent]]

    @property
    def size(self) -> int:
        """Number of elements."""
        return Box.whole(self.shape).size


class BufferSlot(NamedTuple):
    """The slot of a parameter: the number of its bucket, and its offset in it, in elements."""

    param: Param
    bucket: int
    start: int


def place(
    params: Sequence[Param],
    sizes: Sequence[int],
    *,
    edges: Sequence[frozenset[int]] | None = None,
    proved: Callable[[BufferSlot], bool] | None = None,
    joined: bool = False,
) -> list[BufferSlot] | None:
    """The slots of parameters (in the order of the module) in buckets of these sizes; None if they do not fit.

    Args:
        edges: offsets in each bucket at which parameters begin or end, in elements, if they are
            known.
        proved: whether the values in a slot are the parameter's. Without it all parameters must
            fit.
    """
    for align in _ALIGN:
        slots = _place_params(params, sizes, align, edges, proved, joined)
        if slots is not None:
            return slots
    return None


def _place_params(
    params: Sequence[Param],
    sizes: Sequence[int],
    align: int,
    edges: Sequence[frozenset[int]] | None,
    proved: Callable[[BufferSlot], bool] | None,
    joined: bool,  # noqa: FBT001
) -> list[BufferSlot] | None:
    slots: list[BufferSlot] = []
    bucket = base = filled = 0  # `base`: the start of the bucket
    for param in reversed(params):
        if filled == sizes[bucket] and filled and bucket + 1 < len(sizes):
            bucket, filled = bucket + 1, 0
        aligned = base + align_up(filled - base, align)
        # A joined buffer lacks the padding between its buckets: the next parameter may
        # begin a bucket, where the last one ended.
        starts = dict.fromkeys([aligned, *([filled] if joined and proved else [])])
        for start in starts:
            slot, end = BufferSlot(param, bucket, start), start + param.size
            if end > sizes[bucket] or (edges and not {start, end} <= edges[bucket]):
                continue
            if proved is None or proved(slot):
                slots.append(slot)
                base, filled = base if start == aligned else start, end
                break
        else:
            if proved is None:
                return None
    return slots if bucket == len(sizes) - 1 and filled == sizes[bucket] and slots else None


def unproved(params: Iterable[Param], master: FlatTensor) -> str | None:
    """Why nothing proves which states are where in a flat buffer; None if something does."""
    dtype = next((d for d in (master.dtype, *(p.dtype for p in params)) if d not in ITEMSIZE), None)
    if dtype is None:
        return None
    return f"is where only its weight and its fp32 copy could prove: one {why_refused(dtype)}"


def same_values(store: Store, param: Param, master: FlatTensor, start: int) -> bool:
    """Whether a parameter begins and ends as the fp32 copy at this offset does, rounded."""
    import ml_dtypes
    import numpy as np

    from ucformat.reading.execute import read_extents

    if param.dtype not in ("float32", "bfloat16", "float16") or master.dtype != "float32":
        return False
    weight = list(param.weight())
    low = np.dtype(getattr(ml_dtypes, param.dtype, param.dtype))
    n = min(param.size, _SAMPLE)
    for begin in dict.fromkeys((0, param.size - n)):
        boxes = flat_boxes(param.shape, begin, begin + n)
        weight_bytes = read_extents(store, lambda _: weight, boxes, low.itemsize, "a parameter")
        locate = partial(_located, master, start + begin)
        flat_box = [Box((0,), (n,))]
        master_bytes = read_extents(store, locate, flat_box, ITEMSIZE["float32"], "a flat buffer")
        with np.errstate(all="ignore"):
            if np.frombuffer(master_bytes, "<f4").astype(low).tobytes() != weight_bytes:
                return False
    return True


def _located(flat: FlatTensor, start: int, box: Box) -> Iterable[Extent]:
    """The extents of `box`, which begins at element `start` of a flat buffer."""
    return flat.locate(start, start + box.size)


def in_local(
    flat: FlatTensor, start: int, shape: tuple[int, ...], within: Box | None
) -> Iterator[Extent]:
    """The extents of a tensor stored in a flat buffer, as boxes of the tensor."""
    first, last = flat_range(shape, within)
    unit = ITEMSIZE[flat.dtype]
    for extent in flat.locate(start + first, start + last):
        begin, (count,) = first + extent.box.start[0], extent.box.shape
        if count > 1 and extent.strides != (unit,):
            raise IntegrityError(f"{extent.file} holds a flat buffer that is not contiguous")
        yield from flat_extents(shape, begin, begin + count, unit, extent.file, extent.offset)


_WORD_EMBEDDING, _OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def _hint() -> str:
    return (
        "save it with --dist-ckpt-optim-fully-reshardable (or load it once in Megatron and save "
        "it so), which names "
        f"the optimizer's tensors; weights alone: {option_text('optimizer')}"
    )


_Buffer = dict[int, dict[str, str]]  # the entry of each bucket and state


@dataclass(frozen=True, slots=True)
class _RankBuffers:
    """The buffers of one rank's model, and the dtypes of their parameters, by number."""

    group: int
    buffers: dict[int, _Buffer] = field(default_factory=dict)
    dtypes: dict[int, str] = field(default_factory=dict)

    def of_chunk(self, v: int, chunks: int) -> list[tuple[str, _Buffer]]:
        """The buffers of one of several model chunks, each with the dtype of its parameters."""
        each = len(self.buffers) // chunks
        numbers = sorted(self.buffers)[v * each : (v + 1) * each]
        return [(self.dtypes[b], self.buffers[b]) for b in numbers]


_Groups = dict[tuple[int, int], _RankBuffers]  # by optimizer and group


@dataclass(slots=True)
class _Model:
    """The model: its parameters, the ranks' parts of each, and the stages."""

    opened: Opened
    items: Items
    tp: int
    pp: int
    whole: dict[str, ReadableTensor] = field(default_factory=dict)

    def weight(self, name: str) -> ReadableTensor:
        """The whole parameter."""
        if name not in self.whole:
            self.whole[name] = unstacked(Key(name, "weight"), self.opened.weights[name])
        return self.whole[name]

    def regions(self, name: str, rank: int, degree: int) -> tuple[BoxPair, ...]:
        """The regions of a parameter that a tensor-parallel rank holds, one after another."""
        tensor = self.weight(name)
        boxes = sorted({b for b in tensor.boxes() if b.size})
        cut = [d for d, n in enumerate(tensor.shape) if any(b.shape[d] != n for b in boxes)]
        if not cut or not boxes:
            whole = Box.whole(tensor.shape)
            return (BoxPair.aligned(whole, whole),)
        if len(cut) > 1 or len(boxes) not in (degree, 2 * degree):
            raise AmbiguousLayout(
                f"{name} was stored as {len(boxes)} boxes by {degree} tensor-parallel ranks, "
                "which fits no sharding",
                hint=_hint(),
            )
        # Both halves of a gated projection are cut: of these a rank has a part of each.
        mine = boxes[rank::degree] if len(boxes) == 2 * degree else [boxes[rank]]
        out, offset = [], 0
        for box in mine:
            start = [0] * len(box.shape)
            start[cut[0]] = offset
            out.append(BoxPair.aligned(box, Box(tuple(start), box.shape)))
            offset += box.shape[cut[0]]
        return tuple(out)

    def param(self, name: str, rank: int, degree: int) -> Param:
        """A parameter as one rank has it."""
        regions, tensor = self.regions(name, rank, degree), self.weight(name)
        shape = tuple(max(r.box.stop[d] for r in regions) for d in range(len(tensor.shape)))

        def weight() -> Iterator[Extent]:
            for region in regions:
                for e in tensor.extents(region.target):
                    yield replace(e, box=e.box.shift(region.box.start))

        return Param(name, shape, tensor.dtype, weight)


def add_flat_states(
    opened: Opened, items: Items, entries: Sequence[tuple[Bucket, str]], *, stacked: bool
) -> None:
    """Name the contents of the buckets, and add them to the checkpoint's."""
    if stacked:
        raise AmbiguousLayout(
            "the optimizer's states are in flat buckets, which have no stacked form",
            hint=f"open it without `stacked`, or without the optimizer: {option_text('optimizer')}",
        )
    groups: _Groups = {}
    for b, fqn in entries:
        mine = groups.setdefault((b.chained, b.group), _RankBuffers(b.group))
        mine.buffers.setdefault(b.buffer, {}).setdefault(b.number, {})[b.state] = fqn
        mine.dtypes[b.buffer] = re.sub(r"^\(?torch\.(\w+).*", r"\1", b.dtype)
    chains = sorted({c for c, _ in groups})
    dense = [g for c, g in groups if c == chains[0]]
    tp = opened.args.degree("tensor_model_parallel_size") or 1
    pp = opened.args.degree("pipeline_model_parallel_size") or max(1, len(dense) // tp)
    if sorted(dense) != list(range(tp * pp)):
        raise IntegrityError(
            f"{items.meta.file} has optimizer states of the groups {sorted(dense)[:20]}, but "
            f"{tp} tensor-parallel "
            f"ranks and {pp} stages saved it",
            hint="files of several saves are mixed, or some ranks' states are lost",
        )
    model = _Model(opened, items, tp, pp)
    out = _StatesByKey(model)
    stages = _stages(model, groups, chains[0])
    for p, t in product(range(pp), range(tp)):
        _add(out, groups[chains[0], p * tp + t], stages[p], t, tp)
    for chain in chains[1:]:
        _experts(out, groups, chain, stages)
    out.finish()


@dataclass(slots=True)
class _ModelChunk:
    """One model chunk of a stage: its dense parameters and its experts, in order."""

    dense: list[str]
    experts: list[str]


def _stages(model: _Model, groups: _Groups, chain: int) -> list[list[_ModelChunk]]:
    """The chunks of every stage, whose layers fill the buckets of its first rank."""
    names = list(model.opened.weights)
    stack = next((m[1] for n in names if (m := LAYER.fullmatch(n))), "")
    layered: dict[int, list[str]] = {}
    first: list[str] = []
    last: list[str] = []
    for n in names:
        m = LAYER.fullmatch(n)
        if m and m[1] == stack:
            layered.setdefault(int(m[2]), []).append(n)
        else:
            (first if n.startswith("embedding.") else last).append(n)
    each = len(groups[chain, 0].buffers) // len(set(groups[chain, 0].dtypes.values()))
    chunks = model.opened.args.degree("virtual_pipeline_model_parallel_size") or max(1, each)
    total, count = len(layered), model.pp * chunks
    if _OUTPUT_LAYER not in names and _WORD_EMBEDDING in names and count > 1:
        last.append(_OUTPUT_LAYER)  # the last stage's copy of the embedding
    stages: list[list[_ModelChunk]] = [[] for _ in range(model.pp)]
    assigned = 0
    joint = any(c != chain for c, _ in groups)
    for number in range(count):
        v, p = divmod(number, model.pp)
        usual, remaining = total // count, total - assigned
        # Most stages have equally many layers, so that number is tried first.
        tries = (
            [remaining]
            if number == count - 1
            else [k for k in (usual, *range(remaining + 1)) if k <= remaining]
        )
        for layer_count in dict.fromkeys(tries):
            chunk_names = [
                x for i in range(assigned, assigned + layer_count) for x in layered.get(i, [])
            ]
            chunk_names = [
                *(first if number == 0 else []),
                *chunk_names,
                *(last if number == count - 1 else []),
            ]
            experts = [x for x in chunk_names if joint and is_expert(x)]
            chunk = _ModelChunk([x for x in chunk_names if x not in set(experts)], experts)
            buffers = groups[chain, p * model.tp].of_chunk(v, chunks)
            if _fit(model, buffers, chunk.dense, 0, model.tp):
                stages[p].append(chunk)
                assigned += layer_count
                break
        else:
            raise _unproved(model, f"stage {p}")
    return stages


def _fit(
    model: _Model, buffers: list[tuple[str, _Buffer]], names: list[str], rank: int, degree: int
) -> list[tuple[_Buffer, list[BufferSlot]]] | None:
    """The slots of a chunk's parameters in its buffers; None unless they fit in exactly one way."""
    fitting = []
    for dtype, buffer in buffers:
        mine = [n for n in names if model.weight(_stored(model, n)).dtype == dtype]
        slots = _place(model, buffer, mine, rank, degree)
        if slots is None:
            return None
        fitting.append((buffer, slots))
    return fitting


def _stored(model: _Model, name: str) -> str:
    """The parameter whose values this one has: of the last stage's copy the embedding."""
    return name if name in model.opened.weights else _WORD_EMBEDDING


def _place(
    model: _Model, buffer: _Buffer, names: list[str], rank: int, degree: int
) -> list[BufferSlot] | None:
    order = sorted(buffer)
    masters = [_flat(model, buffer[k].get("master")) for k in order]
    any_state = [_flat(model, next(iter(buffer[k].values()))) for k in order]
    sizes = [f.size for f in any_state if f]
    edges = [frozenset(_edges(model, next(iter(buffer[k].values())))) for k in order]

    def proved(slot: BufferSlot) -> bool:
        master = masters[slot.bucket]
        return master is not None and same_values(
            model.opened.store, slot.param, master, slot.start
        )

    params = {n: replace(model.param(_stored(model, n), rank, degree), name=n) for n in names}
    orders = [[params[n] for n in listed] for listed in orders_of(names)]
    ways = _ways(place(listed, sizes, edges=edges) for listed in orders)
    odd = any(unproved(params.values(), m) for m in masters if m is not None)
    if odd and ways:  # any of them: the states whose place nothing proves are refused
        return next(iter(ways.values()))
    if len(ways) > 1:
        ways = {k: slots for k, slots in ways.items() if all(map(proved, slots))}
    if not ways:  # some are frozen
        ways = _ways(place(listed, sizes, edges=edges, proved=proved) for listed in orders)
    return next(iter(ways.values())) if len(ways) == 1 else None


def _ways(
    placed: Iterable[list[BufferSlot] | None],
) -> dict[tuple[tuple[str, int, int], ...], list[BufferSlot]]:
    """The ways to place parameters that differ."""
    ways: dict[tuple[tuple[str, int, int], ...], list[BufferSlot]] = {}
    for slots in placed:
        if slots:
            ways.setdefault(tuple(sorted((s.param.name, s.bucket, s.start) for s in slots)), slots)
    return ways


def _edges(model: _Model, fqn: str) -> Iterator[int]:
    for box in model.items.meta.tensors[fqn].boxes:
        yield from (*box.start, *box.stop)


def _flat(model: _Model, fqn: str | None) -> FlatTensor | None:
    if fqn is None:
        return None
    stored = StackedTensor(model.items, fqn, Key(fqn, "flat"))
    if len(stored.shape) != 1:
        raise IntegrityError(f"{fqn} is not a flat bucket: its shape is {list(stored.shape)}")

    def locate(start: int, stop: int) -> Iterator[Extent]:
        box = Box((start,), (stop - start,))
        info = TensorInfo(fqn, "flat", stored.dtype, box.shape)
        whole = BoxPair.aligned(Box.whole(box.shape), box)
        return View(info, ((info.key, whole),)).extents(lambda _, near: stored.extents(near))

    return FlatTensor(stored.shape[0], stored.dtype, locate)


@dataclass(slots=True)
class _Piece:
    """One rank's part of a state of a parameter; its slot is proved when it is read."""

    model: _Model
    slot: BufferSlot
    flat: FlatTensor
    master: FlatTensor | None
    regions: tuple[BoxPair, ...]
    proved: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def extents(self, within: Box | None) -> Iterator[Extent]:
        with self.lock:
            if not self.proved and self.master is not None:
                slot, store = self.slot, self.model.opened.store
                if not same_values(store, slot.param, self.master, slot.start):
                    raise AmbiguousLayout(
                        f"the optimizer's flat buckets do not hold {self.slot.param.name} at the "
                        "offset in "
                        "Megatron's order of parameters: the fp32 copy there does not match the "
                        "weight",
                        hint=_hint(),
                    )
                self.proved = True
        return in_local(self.flat, self.slot.start, self.slot.param.shape, within)


class _StatesByKey:
    """The states by parameter."""

    def __init__(self, model: _Model) -> None:
        self.model = model
        self.pieces: dict[Key, list[_Piece]] = {}

    def add(self, slot: BufferSlot, buffer: _Buffer, rank: int, degree: int) -> None:
        name = slot.param.name
        if name not in self.model.opened.weights:
            return  # a copy of the embedding, whose states are those of the embedding
        states = buffer[sorted(buffer)[slot.bucket]]
        regions = self.model.regions(name, rank, degree)
        master = _flat(self.model, states.get("master"))
        for state, fqn in states.items():
            flat = _flat(self.model, fqn)
            if flat is not None:
                piece = _Piece(self.model, slot, flat, master, regions)
                self.pieces.setdefault(Key(name, state), []).append(piece)

    def _refused(self, key: Key, pieces: Sequence[_Piece]) -> str | None:
        """Why a state cannot be read, for its dtype or because its place is not proved; else None."""
        dtypes = {p.flat.dtype for p in pieces}
        if odd := sorted(dtypes - ITEMSIZE.keys()):
            return why_refused(odd[0])
        if len(dtypes) > 1:
            raise IntegrityError(
                f"{key} has the dtypes {', '.join(sorted(dtypes))} in the ranks' flat buckets"
            )
        masters = (unproved([p.slot.param], p.master) for p in pieces if p.master is not None)
        return self.model.opened.contents.refused_with(key) or next(filter(None, masters), None)

    def finish(self) -> None:
        """Add them, in the order of the weights."""
        opened, states = self.model.opened, dict.fromkeys(k.state for k in self.pieces)
        for key in (Key(name, s) for name in opened.weights for s in states):
            if (pieces := self.pieces.get(key)) is None:
                continue
            if (reason := self._refused(key, pieces)) is not None:
                opened.contents.refuse(key, reason)
                continue
            shape = self.model.weight(key.name).shape
            parts = [(p.extents, p.regions) for p in pieces]
            tensor = joined(key, pieces[0].flat.dtype, shape, parts)
            add_tensor(opened.contents, tensor, opened.args)


def _add(
    out: _StatesByKey,
    rank_buffers: _RankBuffers,
    chunks: list[_ModelChunk],
    rank: int,
    degree: int,
    experts: range | None = None,
) -> None:
    """The states of one rank's buffers: of its dense parameters, or of these experts."""
    for v, chunk in enumerate(chunks):
        names = chunk.dense
        if experts is not None:
            names = [n for n in chunk.experts if _expert_number(n) in experts]
        buffers = rank_buffers.of_chunk(v, len(chunks))
        fitting = _fit(out.model, buffers, names, rank, degree)
        if fitting is None:
            raise _unproved(out.model, f"group {rank_buffers.group}")
        for buffer, slots in fitting:
            for slot in slots:
                out.add(slot, buffer, rank, degree)


def _expert_number(name: str) -> int:
    match = re.search(r"\.local_experts\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _experts(
    out: _StatesByKey, groups: _Groups, chain: int, stages: list[list[_ModelChunk]]
) -> None:
    """The states of experts, whose ranks form another mesh."""
    model = out.model
    numbers = {_expert_number(n) for stage in stages for chunk in stage for n in chunk.experts}
    mine = sorted(g for c, g in groups if c == chain)
    ranks = len(mine) // model.pp
    etp = model.opened.args.degree("expert_tensor_parallel_size")
    degrees = [etp] if etp else [d for d in range(1, ranks + 1) if ranks % d == 0]
    for degree in degrees:
        ep = ranks // degree
        per_rank, remainder = divmod(len(numbers), ep or 1)
        if mine != list(range(ranks * model.pp)) or remainder or not numbers:
            continue
        trial = _StatesByKey(model)
        try:
            for g in mine:
                p, r = divmod(g, ranks)
                e, t = divmod(r, degree)
                experts = range(e * per_rank, (e + 1) * per_rank)
                _add(trial, groups[chain, g], stages[p], t, degree, experts)
        except AmbiguousLayout:
            continue
        for key, pieces in trial.pieces.items():
            out.pieces.setdefault(key, []).extend(pieces)
        return
    raise _unproved(model, "the experts")


def _unproved(model: _Model, where: str) -> AmbiguousLayout:
    return AmbiguousLayout(
        f"{model.items.meta.file}: the optimizer's flat buckets (format dp_reshardable) of "
        f"{where} cannot be "
        "named: in none of Megatron's orders do the model's parameters fill them with the values "
        "of the weights",
        hint=_hint(),
    )
