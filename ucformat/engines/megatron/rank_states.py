"""The optimizer of a classic checkpoint's rank: its states by the names of the parameters, and its groups.

`optimizer` is a torch optimizer's state dict (fp32), or wraps one beside `fp32_from_fp16_params`,
the fp32 copies by group; of several optimizers (experts have one of their own) it is a list. The
distributed optimizer keeps the states of all data-parallel ranks in `distrib_optim.pt`: for each
buffer of a model chunk one flat tensor for each state, its buckets joined without their padding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.flat_states import (
    FlatTensor,
    Param,
    in_local,
    place,
    same_values,
    unproved,
)
from ucformat.engines.megatron.folder import MODEL, MegatronArguments
from ucformat.engines.megatron.names import Member, groups_by_rule, is_expert
from ucformat.engines.megatron.vocabulary import FilesBeside
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    UnsupportedError,
    first_names,
    option_text,
)
from ucformat.geometry.tensor import Key
from ucformat.reading.stand_ins import Dtype, StoredTensor
from ucformat.reading.values import to_json
from ucformat.sources.index import Group
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.optimizer import Candidate, Entry, match, shape_of_states
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.engines.megatron.flat_states import BufferSlot
    from ucformat.engines.megatron.folder import MegatronFolder
    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.tp_merge import LocalContents
    from ucformat.storage.base import Store


_COPIES = ("fp32_from_fp16_params", "fp32_from_fp16")
_CHECKED = 3  # slots in a buffer that are checked when it is opened


def _without_optimizer() -> str:
    return f"or leave the optimizer out: {option_text('optimizer')}"


def read_states(rank: RankFile, contents: LocalContents) -> list[list[Group]]:
    """Add a rank's optimizer states to its contents."""
    optimizer = rank.values.get("optimizer")
    if optimizer is None:
        return []
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    flats = _flats(rank, len(optimizers))
    out = []
    for number, state_dict in enumerate(optimizers):
        if not isinstance(state_dict, dict):
            raise IntegrityError(f"{rank.file.key}: its optimizer is not a state dict")
        wrapped = isinstance(state_dict.get("optimizer"), dict)
        inner = state_dict["optimizer"] if wrapped else state_dict
        raw = [g for g in inner.get("param_groups") or () if isinstance(g, dict)]
        experts = any(g.get("is_expert_parallel") for g in raw) and len(optimizers) > 1
        members = [
            m for m in _members(rank) if len(optimizers) == 1 or is_expert(m.name) is experts
        ]
        if raw and all("params" in g for g in raw) and isinstance(inner.get("state"), dict):
            copies = (
                next((state_dict[k] for k in _COPIES if k in state_dict), None) if wrapped else None
            )
            out.append(_numbered(rank, contents, inner, raw, members, copies))
        else:
            _distributed(rank, contents, flats, number, [m.name for m in members])
            named = [m for m in members if Key(m.name, "exp_avg") in contents.infos]
            groups = groups_by_rule(raw, named or members, partial(_json, rank.file))
            out.append(groups or [])
    return out


def _json(file: TorchFile, value: Any) -> Any:
    return to_json(value, read=file.read, path="optimizer")


def _members(rank: RankFile) -> list[Member]:
    """The parameters of all chunks, in order."""
    return [
        Member(named[n], len(t.shape))
        for named, tensors in zip(rank.names, rank.chunks, strict=True)
        for n, t in tensors.items()
        if t.dtype.startswith(("float", "bfloat"))
    ]


def _tensors(rank: RankFile) -> dict[str, StoredTensor]:
    return {
        named[n]: t
        for named, chunk in zip(rank.names, rank.chunks, strict=True)
        for n, t in chunk.items()
    }


def _numbered(
    rank: RankFile,
    contents: LocalContents,
    inner: dict[str, Any],
    raw: Sequence[dict[str, Any]],
    members: Sequence[Member],
    copies: Any,
) -> list[Group]:
    """Add a torch optimizer's own states, which are numbered."""
    file, tensors = rank.file, _tensors(rank)
    by_number: dict[Any, Any] = inner["state"]
    numbers = [list(g["params"]) for g in raw]
    states = [
        [s if isinstance(s := by_number.get(n), dict) else {} for n in group] for group in numbers
    ]
    shapes = [[shape_of_states(s) for s in group] for group in states]
    names = _by_rule(raw, members, shapes, tensors)
    if names is None:
        candidates = [Candidate(m.name, tensors[m.name].shape) for m in members]
        names = match([[Entry(s) for s in group] for group in shapes], candidates)
    if names is None:
        raise AmbiguousLayout(
            f"{file.key}: the optimizer's states are numbered ({[len(g) for g in numbers]} "
            "parameters by group), and "
            "their shapes and the order of the model do not determine which parameters these are",
            hint="save it with --ckpt-format torch_dist, " + _without_optimizer(),
        )
    if copies is not None:
        _add_masters(file, contents, names, tensors, copies)
    out = []
    for g, group, of_group in zip(raw, names, states, strict=True):
        plain = {}
        for name, state in zip(group, of_group, strict=True):
            for key, value in state.items():
                if isinstance(value, StoredTensor):
                    contents.add_whole(name, str(key), file, value)
                else:
                    plain[key] = value
        hyper = _json(file, {k: v for k, v in g.items() if k != "params"})
        out.append(Group(list(group), hyper, _json(file, plain)))
    return out


def _add_masters(
    file: TorchFile,
    contents: LocalContents,
    names: Sequence[Sequence[str]],
    tensors: Mapping[str, StoredTensor],
    copies: Any,
) -> None:
    """Add the fp32 copies of the parameters in bf16, fp16 or, perhaps, an unknown dtype."""
    low = [[n for n in group if tensors[n].dtype in ("bfloat16", "float16")] for group in names]
    odd = [
        [n for n in group if n in of_group or not tensors[n].readable]
        for group, of_group in zip(names, low, strict=True)
    ]
    counts = [len(c) for c in copies] if isinstance(copies, list) else None
    copied = next((groups for groups in (low, odd) if counts == [len(g) for g in groups]), None)
    if copied is None:
        raise IntegrityError(
            f"{file.key} has fp32 copies that do not match the parameters in bf16 or fp16"
        )
    for group, masters in zip(copied, copies, strict=True):
        for name, master in zip(group, masters, strict=True):
            if not isinstance(master, StoredTensor) or master.shape != tensors[name].shape:
                raise IntegrityError(f"{file.key}: the fp32 copy of {name} has another shape")
            contents.add_whole(name, "master", file, master)


def _by_rule(
    raw: Sequence[dict[str, Any]],
    members: Sequence[Member],
    shapes: Sequence[Sequence[tuple[int, ...] | None]],
    tensors: dict[str, StoredTensor],
) -> list[list[str]] | None:
    """The names by Megatron's rule for the parameters of groups, if every shape fits."""
    groups = groups_by_rule(raw, members, lambda v: v)
    if groups is None or [len(g.names) for g in groups] != [len(s) for s in shapes]:
        return None
    names = [g.names for g in groups]
    pairs = zip(chain(*names), chain(*shapes), strict=True)
    return names if all(s in (None, tensors[n].shape) for n, s in pairs) else None


def _flats(rank: RankFile, count: int) -> list[dict[Any, Any] | None]:
    """The contents of `distrib_optim.pt`, by optimizer."""
    if rank.distrib is None:
        return [None] * count
    value = rank.distrib.value
    flats = value if isinstance(value, list) else [value]
    for flat in flats:
        if flat is not None and not (
            isinstance(flat, dict) and flat.get("buckets_coalesced") is True
        ):
            raise UnsupportedError(
                f"{rank.distrib.key} is of a distributed optimizer from before February 2024, "
                "which is not supported",
                hint="update it with Megatron's --ckpt-convert-update-legacy-dist-opt-format, "
                + _without_optimizer(),
            )
    if len(flats) != count:
        raise IntegrityError(
            f"{rank.distrib.key} has the states of {len(flats)} optimizers, {rank.file.key} {count}"
        )
    return flats


def _distributed(
    rank: RankFile,
    contents: LocalContents,
    flats: Sequence[dict[Any, Any] | None],
    number: int,
    names: Sequence[str],
) -> None:
    """Add the distributed optimizer's states from its flat buffers."""
    value, file = flats[number], rank.distrib
    if file is None:
        raise MissingData(
            f"{rank.file.key} is of a distributed optimizer, but distrib_optim.pt beside it is "
            "missing",
            hint=f"copy it from where it was saved, {_without_optimizer()}",
        )
    if value is None:  # they are in another expert-parallel rank's file
        return
    buffers = sorted(k for k in value if isinstance(k, int))
    kinds = {dtypes for b in buffers for dtypes in value[b]}
    per = max(1, len(buffers) // len(rank.chunks))
    if len(buffers) not in (len(rank.chunks) * len(kinds), len(rank.chunks)):
        raise IntegrityError(
            f"{file.key} has {len(buffers)} buffers of {len(rank.chunks)} model chunks"
        )
    chosen = set(names)
    for i, b in enumerate(buffers):
        parameters, named = rank.chunks[i // per], rank.names[i // per]
        for dtypes, tensors in value[b].items():
            low = next(iter(dtypes), None) if isinstance(dtypes, tuple) else None
            params = [
                Param(named[n], t.shape, t.dtype, partial(rank.file.whole, t))
                for n, t in parameters.items()
                if named[n] in chosen
                and isinstance(low, Dtype)
                and t.dtype.partition(" ")[0] == low.name
            ]
            _add_buffer(rank, contents, file, params, tensors)


def _add_buffer(
    rank: RankFile,
    contents: LocalContents,
    file: TorchFile,
    params: Sequence[Param],
    tensors: dict[str, Any],
) -> None:
    flats = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, StoredTensor):
            flat = FlatTensor(tensor.size, tensor.dtype, partial(_range, file, tensor))
            flats["master" if key == "param" else key] = flat
    master = flats.get("master")
    if master is None or len({f.size for f in flats.values()}) > 1:
        raise IntegrityError(
            f"{file.key} has a buffer without `param`, or with states of several lengths"
        )
    if (reason := unproved(params, master)) is not None:
        for param, state in product(params, flats):
            contents.refuse(Key(param.name, state), reason)
        return

    def proved(slot: BufferSlot) -> bool:
        return same_values(file.store, slot.param, master, slot.start)

    slots = place(params, [master.size])
    checked = [*slots[:: max(1, len(slots) // _CHECKED)], slots[-1]] if slots else ()
    # Frozen parameters have no slot: find those whose values are there.
    if not checked or not all(map(proved, checked)):
        slots = place(params, [master.size], proved=proved, joined=True)
    if slots is None:
        raise AmbiguousLayout(
            f"{file.key}: a flat buffer of {master.size:,} elements cannot be named: in "
            "Megatron's order the "
            f"parameters of {rank.file.key} do not fill it with the values of the weights",
            hint="save it with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, "
            + _without_optimizer(),
        )
    # Buffers hold the parameters in the reverse order of the module.
    for slot in reversed(slots):
        check = _Proof(partial(proved, slot), file.key, slot.param.name)
        for state, flat in flats.items():
            locate = partial(_proved, check, flat, slot)
            contents.add(slot.param.name, state, flat.dtype, slot.param.shape, locate)


@dataclass(slots=True)
class _Proof:
    """Check once, when states are read, that the fp32 copy in a parameter's slot is its weight."""

    proved: Callable[[], bool]
    file: str
    name: str
    done: bool = False

    def __call__(self) -> None:
        if not self.done and not self.proved():
            raise AmbiguousLayout(
                f"{self.file} does not hold {self.name} at the offset in Megatron's order of "
                "parameters: the fp32 copy "
                "there does not match the weight",
                hint=(
                    "the two files are of different saves, or the parameters are not in "
                    "Megatron's order; "
                )
                + _without_optimizer(),
            )
        self.done = True


def _proved(
    check: _Proof, flat: FlatTensor, slot: BufferSlot, within: Box | None
) -> Iterator[Extent]:
    check()
    return in_local(flat, slot.start, slot.param.shape, within)


def _range(file: TorchFile, tensor: StoredTensor, start: int, stop: int) -> Iterator[Extent]:
    """A range of a flat tensor, with extents relative to its start."""
    return file.flat(tensor, start, (stop - start,), 0, stop - start)


# The classic files: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each rank, and their parameters
# by global names.
#
# TT is the tensor-parallel rank, PPP the pipeline stage (if there are several), EEE the
# expert-parallel rank (if there are several). A rank counts its own layers and experts from 0;
# `model` is its part of the model, or `model0`, `model1`, … are its chunks under interleaved
# stages. Old files nest the names.

Coordinate = tuple[int, int, int]  # tensor-parallel rank, pipeline stage, expert-parallel rank

_DEPTH = 20
_CHUNK = re.compile(r"model(\d{0,3})")
_LAYER = re.compile(r"((?:[^.]+\.)*?layers)\.(\d{1,6})\.", re.DOTALL)
_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,6})(.*)", re.DOTALL
)
_OLD = re.compile(r".*mp_rank_[\d_]+/(optim\.pt|layer_wise_optimizer_\d+\.pt)")
_COPY = "copy the folders of all ranks; each wrote its own, perhaps to its node's disk"


@dataclass(slots=True)
class RankFile:
    """One rank's file: the tensors of each model chunk, in the order of the module."""

    coordinate: Coordinate
    file: TorchFile
    values: dict[str, Any]
    chunks: list[dict[str, StoredTensor]]
    extra: dict[str, Any]
    distrib: TorchFile | None
    # of each chunk: local name -> global name
    names: list[dict[str, str]] = field(default_factory=list)


def read_ranks(
    store: Store, place: MegatronFolder, allow: tuple[str, ...], vocab: int | None
) -> tuple[dict[Coordinate, RankFile], MegatronArguments]:
    """The files of all ranks, each of which must have one, and the arguments in the first."""
    below = f"{place.folder}/" if place.folder else ""
    keys = [info.key for info in store.list(place.folder)]
    files = {m: k for k in keys if (m := MODEL.fullmatch(k.removeprefix(below)))}
    if unsupported := next((k for k in keys if _OLD.fullmatch(k)), None):
        raise UnsupportedError(
            f"{unsupported}: an optimizer in the files of data-parallel ranks is not read",
            hint=(
                "load it with the Megatron that wrote it, and save it with --ckpt-format torch_dist"
            ),
        )
    if not files:
        raise MissingData(
            f"{store.url}/{place.folder} has no mp_rank_*/model_optim_rng.pt",
            hint="the save did not finish, or files were lost",
        )
    first = min(files.values())
    args = MegatronArguments.of(
        _value(TorchFile(store, first, allow=allow)).get("args"),
        vocab,
        first,
        FilesBeside(store, place.folder, ""),
    )
    grid = _grid(files, args)
    there = set(keys)

    def load(item: tuple[Coordinate, str]) -> RankFile:
        coordinate, key = item
        beside = f"{key.rpartition('/')[0]}/distrib_optim.pt"
        distrib = TorchFile(store, beside, allow=allow) if beside in there else None
        return _parse(coordinate, TorchFile(store, key, allow=allow), distrib)

    ranks = {rank.coordinate: rank for rank in map_io(load, sorted(grid.items()))}
    _name_parameters(ranks)
    return ranks, args


def _value(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.value, dict):
        raise IntegrityError(
            f"{file.key} holds no dictionary", hint="it is not a Megatron checkpoint"
        )
    return file.value


def _grid(files: dict[re.Match[str], str], args: MegatronArguments) -> dict[Coordinate, str]:
    """The files by rank, after a check that they are those that the arguments record."""
    pp = args.degree("pipeline_model_parallel_size")
    ep = args.degree("expert_model_parallel_size") or 1
    out: dict[Coordinate, str] = {}
    for m, key in files.items():
        numbers = [int(n) for n in m.groups()[:3] if n is not None]
        t, others = numbers[0], numbers[1:]
        # With a single stage the only further number is that of the expert-parallel rank.
        if len(others) == 1 and (pp == 1 and ep > 1):
            others = [0, others[0]]
        p, e = (*others, 0, 0)[:2]
        if out.setdefault((t, p, e), key) != key:
            raise IntegrityError(
                f"{out[t, p, e]} and {key} are of the same rank",
                hint="two saves were made to one folder; move one elsewhere",
            )
    high = tuple(1 + max(coordinate[i] for coordinate in out) for i in range(3))
    tp = args.degree("tensor_model_parallel_size", "model_parallel_size") or high[0]
    degrees = (tp, pp or high[1], ep if args.degree("expert_model_parallel_size") else high[2])
    if degrees[0] * degrees[1] * degrees[2] > 1 << 20:
        raise IntegrityError(f"{args.file} records {degrees} ranks")
    whole = set(product(*map(range, degrees)))
    if over := sorted(out.keys() - whole):
        raise IntegrityError(
            f"{out[over[0]]} does not belong to this checkpoint, which {degrees[0]} "
            f"tensor-parallel ranks x {degrees[1]} "
            f"stages x {degrees[2]} expert-parallel ranks saved",
            hint="an earlier save by more ranks left it; move it elsewhere",
        )
    if lost := sorted(whole - out.keys()):
        names = first_names((f"tp {t} pp {p} ep {e}" for t, p, e in lost), 10)
        raise MissingData(
            f"the files of the ranks {names} are missing; {len(out)} are present", hint=_COPY
        )
    return out


def _parse(coordinate: Coordinate, file: TorchFile, distrib: TorchFile | None) -> RankFile:
    values = _value(file)
    chunks: list[dict[str, StoredTensor]] = []
    extra: dict[str, Any] = {}
    names = sorted(
        (k for k in values if isinstance(k, str) and _CHUNK.fullmatch(k)), key=lambda k: (len(k), k)
    )
    for i, key in enumerate(names):
        if key not in ("model", f"model{i}"):
            raise MissingData(f"{file.key} has {', '.join(names)}, with a gap")
        flat = dict(_flattened(values[key], "", file.key, 0))
        chunks.append({k: v for k, v in flat.items() if isinstance(v, StoredTensor)})
        not_tensors = {k: v for k, v in flat.items() if not isinstance(v, StoredTensor)}
        extra |= {f"{key}.{k}": v for k, v in not_tensors.items() if v is not None}
    if not chunks:
        raise IntegrityError(f"{file.key} has no `model`", hint="it is not a Megatron checkpoint")
    return RankFile(coordinate, file, values, chunks, extra, distrib)


def _flattened(value: Any, path: str, key: str, depth: int) -> Iterable[tuple[str, Any]]:
    if depth > _DEPTH:
        raise UnsupportedError(f"{key} nests its model more than {_DEPTH} deep")
    if not isinstance(value, dict):
        yield path, value
        return
    for k, v in value.items():
        if not isinstance(k, str):
            raise IntegrityError(f"{key} has a tensor whose name is not a string")
        yield from _flattened(v, f"{path}.{k}" if path else k, key, depth + 1)


def _name_parameters(ranks: dict[Coordinate, RankFile]) -> None:
    """Give every parameter its global name, with layers and experts counted through all ranks."""
    stages = 1 + max(p for _, p, _ in ranks)
    chunks = len(ranks[0, 0, 0].chunks)
    offsets: dict[tuple[int, int], dict[str, int]] = {}
    layers_before: dict[str, int] = {}
    for v in range(chunks):
        for p in range(stages):
            offsets[v, p] = dict(layers_before)
            rank = ranks[0, p, 0]
            if len(rank.chunks) != chunks:
                raise IntegrityError(
                    f"{rank.file.key} has {len(rank.chunks)} model chunks, others have {chunks}"
                )
            for stack, count in _layers(rank.chunks[v], rank.file.key).items():
                layers_before[stack] = layers_before.get(stack, 0) + count
    for (_, p, e), rank in ranks.items():
        for v, tensors in enumerate(rank.chunks):
            experts = _experts(tensors)
            named = {n: _expert_name(_layer_name(n, offsets[v, p]), e, experts) for n in tensors}
            if len(set(named.values())) < len(named):
                raise IntegrityError(
                    f"{rank.file.key} has two parameters that would have the same name"
                )
            rank.names.append(named)


def _layers(tensors: Iterable[str], key: str) -> dict[str, int]:
    """The number of layers of each stack."""
    by_stack: dict[str, set[int]] = {}
    for name in tensors:
        if m := _LAYER.match(name):
            by_stack.setdefault(m[1], set()).add(int(m[2]))
    for stack, numbers in by_stack.items():
        if numbers != set(range(len(numbers))):
            raise IntegrityError(
                f"{key} has the layers {sorted(numbers)[:20]} of {stack}, with a gap"
            )
    return {stack: len(numbers) for stack, numbers in by_stack.items()}


def _layer_name(name: str, offsets: dict[str, int]) -> str:
    m = _LAYER.match(name)
    return f"{m[1]}.{int(m[2]) + offsets.get(m[1], 0)}.{name[m.end() :]}" if m else name


def _experts(tensors: Iterable[str]) -> int:
    return 1 + max((int(m[2]) for n in tensors if (m := _EXPERT.fullmatch(n))), default=-1)


def _expert_name(name: str, rank: int, each: int) -> str:
    m = _EXPERT.fullmatch(name)
    return f"{m[1]}{int(m[2]) + rank * each}{m[3]}" if m else name
