"""Many ranks: a ZeRO-3 checkpoint of N ranks, in DeepSpeed's format, read by N ranks of other layouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.paper_cell import Cell, Expected, read_all
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import open_checkpoint
from ucformat.geometry.layout import Layout
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["many_ranks"]

Arrays = dict[tuple[str, str], Any]

_SUB_GROUPS = 8  # about so many, where ZeRO 3 cuts its group


def many_ranks(folder: Path, ranks: int, hidden: int = 222, layers: int = 3) -> Iterator[Cell]:
    """Write it, and read it as each of three layouts: ZeRO 3 with other sub-groups, FSDP2, ZeRO 1.

    `needed` is the size of the state: each byte of it is on one rank, but for `step`, which all
    have.
    """
    arrays = _llama(hidden, layers)
    write_zero3(folder, arrays, ranks)
    size = sum(a.nbytes for a in arrays.values())
    most = sum(-(-math.prod(s) // ranks) for s in _shapes(arrays).values()) // _SUB_GROUPS
    flat = {"flat": "optimizer", "over": "dp"}
    ways: dict[str, tuple[dict[str, Any], list[Expected]]] = {
        f"ZeRO 3, sub-groups of {most:,} elements": (
            {**flat, "cut": "before_join", "max_elements": most},
            _zero3(arrays, ranks, most),
        ),
        "FSDP2": ({"shard": 0, "over": "dp"}, _fsdp2(arrays, ranks)),
        "ZeRO 1": ({**flat, "group_pad": 2}, _zero1(arrays, ranks)),
    }
    steps = {(n, "step"): np.array(5, np.float32) for n in _shapes(arrays)}
    for title, (place, expected) in ways.items():
        step = {"match": "*", "states": ["step"], "place": ["replicate"]}
        where = Layout({"dp": ranks}, [step, {"match": "*", "place": [place]}])
        recorder = RecordingStore(LocalStore(folder))
        ck = open_checkpoint(recorder)
        opened = recorder.nbytes
        read, planning, wrong = read_all(
            ck, recorder, where, [held | steps for held in expected].__getitem__
        )
        yield Cell(f"{ranks} ranks of ZeRO 3", title, ranks, size, read, opened + planning, wrong)


def _llama(hidden: int, layers: int) -> Arrays:
    """A Llama's tensors, of sizes that no number of ranks divides."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8 * hidden + 3, hidden)}
    for i in range(layers):
        of = f"model.layers.{i}."
        inner = 8 * hidden // 3 + 1
        shapes |= {f"{of}self_attn.qkv_proj.weight": (hidden + 2 * (hidden // 3), hidden)}
        shapes |= {
            f"{of}self_attn.o_proj.weight": (hidden, hidden),
            f"{of}input_layernorm.weight": (hidden,),
        }
        shapes |= {
            f"{of}mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{of}mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(0)
    return {
        (n, s): rng.standard_normal(shape, np.float32) for n, shape in shapes.items() for s in FLAT
    }


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {n: a.shape for (n, s), a in arrays.items() if s == "master"}


def _zero3(arrays: Arrays, ranks: int, most: int) -> list[Expected]:
    """Parts of each parameter, joined until a sub-group is full: `_create_fp16_sub_groups` of DeepSpeed's stage3.py."""
    out: list[Expected] = [{} for _ in range(ranks)]
    for state in FLAT:
        groups: list[list[Any]] = [[]]
        for (_, other), a in arrays.items():
            if other != state:
                continue
            if sum(part.shape[1] for part in groups[-1]) >= most:
                groups.append([])
            groups[-1].append(np.pad(a.reshape(-1), (0, -a.size % ranks)).reshape(ranks, -1))
        for number, group in enumerate(groups):
            for rank, held in enumerate(np.concatenate(group, axis=1)):
                out[rank][f"flat:0.{number}", state] = held
    return out


def _zero1(arrays: Arrays, ranks: int) -> list[Expected]:
    """All joined, padded to equal partitions of an even number of elements."""
    out: list[Expected] = [{} for _ in range(ranks)]
    for state in FLAT:
        flat = np.concatenate([a.reshape(-1) for (_, s), a in arrays.items() if s == state])
        for rank, held in enumerate(np.split(np.pad(flat, (0, -flat.size % (2 * ranks))), ranks)):
            out[rank]["flat:0", state] = held
    return out


def _fsdp2(arrays: Arrays, ranks: int) -> list[Expected]:
    """`torch.chunk` of dim 0: the last ranks may have less, or nothing."""
    return [
        {
            key: a[rank * (size := -(-len(a) // ranks)) : (rank + 1) * size]
            for key, a in arrays.items()
        }
        for rank in range(ranks)
    ]
