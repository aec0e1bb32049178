"""The classic files: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each rank, and their parameters by global names.

TT is the tensor-parallel rank, PPP the pipeline stage (if there are several), EEE the expert-parallel rank (if there
are several). A rank counts its own layers and experts from 0; `model` is its part of the model, or `model0`, `model1`,
… are its chunks under interleaved stages. Old files nest the names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.sources.megatron.arguments import Arguments
from ucformat.sources.megatron.folder import MODEL
from ucformat.sources.pickle.file import TorchFile
from ucformat.sources.pickle.stand_ins import StoredTensor
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucformat.sources.megatron.folder import MegatronFolder
    from ucformat.storage.base import Store

At = tuple[int, int, int]  # tensor-parallel rank, pipeline stage, expert-parallel rank

_DEPTH = 20
_MAX_LISTED = 10
_CHUNK = re.compile(r"model(\d{0,3})")
_LAYER = re.compile(r"((?:[^.]+\.)*?layers)\.(\d{1,6})\.", re.DOTALL)
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,6})(.*)", re.DOTALL)
_OLD = re.compile(r".*mp_rank_[\d_]+/(optim\.pt|layer_wise_optimizer_\d+\.pt)")
_COPY = "copy the folders of all ranks; each wrote its own, perhaps to its node's disk"


@dataclass(slots=True)
class RankFile:
    """One rank's file: each model chunk's tensors, in the order of the module, by local and later by global names."""

    at: At
    file: TorchFile
    values: dict[str, Any]
    chunks: list[dict[str, StoredTensor]]
    extra: dict[str, Any]
    distrib: TorchFile | None
    names: list[dict[str, str]] = field(default_factory=list)  # of each chunk: local name -> global name


def read_ranks(
    store: Store, place: MegatronFolder, allow: tuple[str, ...], vocab: int | None
) -> tuple[dict[At, RankFile], Arguments]:
    """Open the files of all ranks, each of which must have one.

    Args:
        vocab: the caller's rows of the vocabulary without padding; None if not given.

    Returns:
        the files by rank, and the arguments in the first.
    """
    below = f"{place.folder}/" if place.folder else ""
    keys = [info.key for info in store.list(place.folder)]
    found = {m: k for k in keys if (m := MODEL.fullmatch(k.removeprefix(below)))}
    if old := next((k for k in keys if _OLD.fullmatch(k)), None):
        raise UnsupportedError(
            f"{old}: an optimizer in the files of data-parallel ranks is not read",
            hint="load it with the Megatron that wrote it, and save it with --ckpt-format torch_dist",
        )
    if not found:
        raise MissingData(
            f"{store.url}/{place.folder} has no mp_rank_*/model_optim_rng.pt",
            hint="the save did not finish, or files were lost",
        )
    first = min(found.values())
    args = Arguments.of(_value(TorchFile(store, first, allow=allow)).get("args"), vocab, first)
    grid = _grid(found, args)
    there = set(keys)

    def load(item: tuple[At, str]) -> RankFile:
        at, key = item
        beside = f"{key.rpartition('/')[0]}/distrib_optim.pt"
        distrib = TorchFile(store, beside, allow=allow) if beside in there else None
        return _parse(at, TorchFile(store, key, allow=allow), distrib)

    ranks = {rank.at: rank for rank in map_io(load, sorted(grid.items()))}
    _number(ranks)
    return ranks, args


def _value(file: TorchFile) -> dict[str, Any]:
    if not isinstance(file.value, dict):
        raise IntegrityError(f"{file.key} holds no dictionary", hint="it is not a Megatron checkpoint")
    return file.value


def _grid(found: dict[re.Match[str], str], args: Arguments) -> dict[At, str]:
    """The files by rank; MissingData if there are fewer than the arguments record, IntegrityError if more."""
    pp = args.degree("pipeline_model_parallel_size")
    ep = args.degree("expert_model_parallel_size") or 1
    out: dict[At, str] = {}
    for m, key in found.items():
        numbers = [int(n) for n in m.groups()[:3] if n is not None]
        t, rest = numbers[0], numbers[1:]
        if len(rest) == 1 and (pp == 1 and ep > 1):
            rest = [0, rest[0]]
        p, e = (*rest, 0, 0)[:2]
        if out.setdefault((t, p, e), key) != key:
            raise IntegrityError(
                f"{out[t, p, e]} and {key} are of the same rank",
                hint="two saves were made to one folder; move one elsewhere",
            )
    high = tuple(1 + max(at[i] for at in out) for i in range(3))
    tp = args.degree("tensor_model_parallel_size", "model_parallel_size") or high[0]
    wanted = (tp, pp or high[1], ep if args.degree("expert_model_parallel_size") else high[2])
    if wanted[0] * wanted[1] * wanted[2] > 1 << 20:
        raise IntegrityError(f"{args.file} records {wanted} ranks")
    whole = {(t, p, e) for t in range(wanted[0]) for p in range(wanted[1]) for e in range(wanted[2])}
    if over := sorted(out.keys() - whole):
        raise IntegrityError(
            f"{out[over[0]]} does not belong to this checkpoint, which {wanted[0]} tensor-parallel ranks x {wanted[1]} "
            f"stages x {wanted[2]} expert-parallel ranks saved",
            hint="an earlier save by more ranks left it; move it elsewhere",
        )
    if lost := sorted(whole - out.keys()):
        more = f" and {len(lost) - _MAX_LISTED} more" if len(lost) > _MAX_LISTED else ""
        shown = ", ".join(f"tp {t} pp {p} ep {e}" for t, p, e in lost[:_MAX_LISTED])
        raise MissingData(f"the files of the ranks {shown}{more} are missing; {len(out)} are present", hint=_COPY)
    return out


def _parse(at: At, file: TorchFile, distrib: TorchFile | None) -> RankFile:
    values = _value(file)
    chunks: list[dict[str, StoredTensor]] = []
    extra: dict[str, Any] = {}
    names = sorted((k for k in values if isinstance(k, str) and _CHUNK.fullmatch(k)), key=lambda k: (len(k), k))
    for i, key in enumerate(names):
        if key not in ("model", f"model{i}"):
            raise MissingData(f"{file.key} has {', '.join(names)}, with a gap")
        flat = dict(_flattened(values[key], "", file.key, 0))
        chunks.append({k: v for k, v in flat.items() if isinstance(v, StoredTensor)})
        extra |= {f"{key}.{k}": v for k, v in flat.items() if not isinstance(v, StoredTensor) and v is not None}
    if not chunks:
        raise IntegrityError(f"{file.key} has no `model`", hint="it is not a Megatron checkpoint")
    return RankFile(at, file, values, chunks, extra, distrib)


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


def _number(ranks: dict[At, RankFile]) -> None:
    """Give every parameter its global name: layers are counted through chunks and stages, experts through ranks."""
    stages = 1 + max(p for _, p, _ in ranks)
    chunks = len(ranks[0, 0, 0].chunks)
    offsets: dict[tuple[int, int], dict[str, int]] = {}
    at: dict[str, int] = {}
    for v in range(chunks):
        for p in range(stages):
            offsets[v, p] = dict(at)
            rank = ranks[0, p, 0]
            if len(rank.chunks) != chunks:
                raise IntegrityError(f"{rank.file.key} has {len(rank.chunks)} model chunks, others have {chunks}")
            for stack, count in _layers(rank.chunks[v], rank.file.key).items():
                at[stack] = at.get(stack, 0) + count
    for (_, p, e), rank in ranks.items():
        for v, tensors in enumerate(rank.chunks):
            experts = _experts(tensors)
            named = {n: _expert_name(_layer_name(n, offsets[v, p]), e, experts) for n in tensors}
            if len(set(named.values())) < len(named):
                raise IntegrityError(f"{rank.file.key} has two parameters that would have the same name")
            rank.names.append(named)


def _layers(tensors: Iterable[str], key: str) -> dict[str, int]:
    """The number of layers of each stack."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        if m := _LAYER.match(name):
            found.setdefault(m[1], set()).add(int(m[2]))
    for stack, numbers in found.items():
        if numbers != set(range(len(numbers))):
            raise IntegrityError(f"{key} has the layers {sorted(numbers)[:20]} of {stack}, with a gap")
    return {stack: len(numbers) for stack, numbers in found.items()}


def _layer_name(name: str, offsets: dict[str, int]) -> str:
    m = _LAYER.match(name)
    return f"{m[1]}.{int(m[2]) + offsets.get(m[1], 0)}.{name[m.end() :]}" if m else name


def _experts(tensors: Iterable[str]) -> int:
    return 1 + max((int(m[2]) for n in tensors if (m := _EXPERT.fullmatch(n))), default=-1)


def _expert_name(name: str, rank: int, held: int) -> str:
    m = _EXPERT.fullmatch(name)
    return f"{m[1]}{int(m[2]) + rank * held}{m[3]}" if m else name
