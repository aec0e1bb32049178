"""The checkpoint of `bench/s3.py`: a Llama of 1 GB in bfloat16, and the two ways in which eight ranks cut it."""

from __future__ import annotations

import json
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import ucformat
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.storage.memory import MemoryStore

HIDDEN, INNER, KV, VOCABULARY, LAYERS = 2048, 5632, 512, 32000, 8
DTYPE = "bfloat16"
WAYS, RANK = 8, 3
LAYOUTS = ("Megatron's", "all along dim 0")
#: Small ones make a quick try of the benchmark itself.
if os.environ.get("UCP_BENCH_SMALL"):
    HIDDEN, INNER, KV, VOCABULARY, LAYERS = 512, 1408, 128, 4000, 2


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        out |= {
            f"{p}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{p}.self_attn.k_proj.weight": (KV, HIDDEN),
            f"{p}.self_attn.v_proj.weight": (KV, HIDDEN),
            f"{p}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{p}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{p}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{p}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{p}.input_layernorm.weight": (HIDDEN,),
            f"{p}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return out | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def content(name: str) -> Any:
    """A tensor."""
    return random_array(shapes()[name], DTYPE, list(shapes()).index(name))


def dim_of(name: str, layout: str) -> int | None:
    """Along which dim it is cut; None: each rank holds all of it."""
    if len(shapes()[name]) == 1:
        return None
    return 1 if layout == LAYOUTS[0] and ("o_proj" in name or "down_proj" in name) else 0


def cut(name: str, layout: str) -> tuple[slice, ...]:
    """What the rank holds of a tensor."""
    shape, dim = shapes()[name], dim_of(name, layout)
    part = [slice(0, n) for n in shape]
    if dim is not None:
        n = shape[dim] // WAYS
        part[dim] = slice(RANK * n, (RANK + 1) * n)
    return tuple(part)


def local_shape(name: str, layout: str) -> tuple[int, ...]:
    """The shape of that."""
    return tuple(s.stop - s.start for s in cut(name, layout))


def layout_of(layout: str) -> ucformat.Layout:
    """The layout as ucformat takes it."""
    rules: list[dict[str, Any]] = [{"match": "*norm.weight", "place": ["replicate"]}]
    if layout == LAYOUTS[0]:
        rules.append(
            {"match": ["*.o_proj.*", "*.down_proj.*"], "place": [{"shard": 1, "over": "tp"}]}
        )
    return ucformat.Layout(
        {"tp": WAYS}, [*rules, {"match": "*", "place": [{"shard": 0, "over": "tp"}]}]
    )


def least_requests(folder: Path, layout: str, most: int) -> int:
    """The requests for what the rank holds, of at most so many bytes each, if no other byte is read.

    Chunks lie in a file in the order of the grid: those that a cut takes are as many runs as it
    takes rows of chunks, unless it takes these whole.
    """
    universal = ucformat.open(folder / "universal")
    requests = 0
    for tensor in universal.manifest.tensors:
        path = folder / "universal" / str(tensor.path) / "zarr.json"
        (codec,) = json.loads(path.read_text())["codecs"]
        chunk = codec["configuration"]["chunk_shape"]
        nbytes = 2 * math.prod(chunk) + 4  # with the checksum
        runs = run = 1
        whole = True
        dims = zip(cut(tensor.name, layout), shapes()[tensor.name], chunk, strict=True)
        for part, n, size in reversed(list(dims)):
            taken = -(-part.stop // size) - part.start // size
            if whole:
                run *= taken
            else:
                runs *= taken
            whole = whole and taken == -(-n // size)
        requests += runs * -(-run // (most // nbytes))
    return requests


def check(arrays: dict[str, Any], layout: str) -> None:
    """See that some tensors of each kind are what was saved."""
    for name in shapes():
        if ".layers." not in name or ".layers.1." in name:
            expected = np.ascontiguousarray(content(name)[cut(name, layout)])
            assert arrays[name].tobytes() == expected.tobytes(), name


def make_universal(folder: Path) -> None:
    """The checkpoint as ucformat writes it."""
    arrays = {(name, "weight"): content(name) for name in shapes()}
    source = FakeSource.write(MemoryStore("bench-s3"), arrays, ranks=2)
    ucformat.convert(Checkpoint(source), folder, overwrite=True)


def make_dcp(folder: Path) -> None:
    """The checkpoint as eight ranks of FSDP save it through PyTorch's DCP."""
    import torch.multiprocessing as mp

    mp.spawn(_save, (str(folder),), nprocs=WAYS)


def _save(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder).absolute()}.init", rank=rank, world_size=WAYS
    )
    mesh = init_device_mesh("cpu", (WAYS,))
    state = {}
    for name, shape in shapes().items():
        n = -(-shape[0] // WAYS)
        mine = torch.from_numpy(
            content(name)[rank * n : (rank + 1) * n].view(np.int16).copy()
        ).view(torch.bfloat16)
        state[name] = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    dist_cp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def made(out: Path) -> Path:
    """The folder of both, made once."""
    folder = out / ("s3-small" if LAYERS == 2 else "s3")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "dcp" / ".metadata").exists():
        make_dcp(folder / "dcp")
        folder.joinpath("dcp.init").unlink(missing_ok=True)
    return folder
