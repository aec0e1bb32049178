"""100,000 extents in some 1,000 files: the seconds to open them in place, to plan one rank of 512, to register them.

`python -m bench.scale`. Four kinds of checkpoint with no tensors' bytes worth speaking of:
safetensors shards (a tensor an extent), a PyTorch DCP folder (100 chunks a tensor), DeepSpeed ZeRO
3 of 334 ranks (three states of 100 parameters), and the virtual checkpoint that registering the
second one makes. Each run is a process of its own, imports done.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from bench.common import OUT, median, table
from tests.zero_files import FLAT, write_zero3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS, FILES, EACH = 3, 1000, 100
FOLDER = OUT / "scale"
ACTS = """
import sys, time
import ucformat
ucformat.open, ucformat.convert
from ucformat import Layout
place, target = sys.argv[1:]
layout = Layout({"dp": 512}, [{"match": "*", "states": ["step"], "place": ["replicate"]},
                              {"match": "*", "place": [{"shard": 0, "over": "dp"}]}])
begun = time.perf_counter()
ck = ucformat.open(place)
opened = time.perf_counter()
ck.plan(layout, 5)
planned = time.perf_counter()
if target:
    ucformat.convert(ck, target, virtual=True)
print(opened - begun, planned - opened, time.perf_counter() - planned)
"""


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    kinds: dict[str, Callable[[Path], None]] = {
        "safetensors, 100,000 tensors": write_safetensors,
        "PyTorch DCP, 1,000 tensors": write_dcp,
        "DeepSpeed ZeRO 3, 300 tensors": write_zero,
    }
    rows = []
    for number, (label, write) in enumerate(kinds.items()):
        place = FOLDER / str(number)
        place.mkdir()
        write(place)
        rows.append([label, *measured(place, register=True)])
        if write is write_dcp:
            rows.append(
                ["virtual, of that", *measured(FOLDER / f"{number}-virtual", register=False)]
            )
    begun = time.perf_counter()
    pickle.loads((FOLDER / "1" / ".metadata").read_bytes())  # noqa: S301 - written above
    plain = time.perf_counter() - begun
    print(f"100,000 extents in about 1,000 files; seconds, medians of {ROUNDS} runs:\n")
    print(table(["", "open", "plan 1 rank of 512", "register virtually"], rows))
    print(f"\n`pickle.load` of DCP's `.metadata`: {plain:.2f} s.")


def measured(place: Path, *, register: bool) -> list[str]:
    """Seconds of each act."""
    found: list[list[float]] = []
    for _ in range(ROUNDS):
        target = FOLDER / f"{place.name}-virtual"
        if register:
            shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-c", ACTS, str(place), str(target) if register else ""]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append([float(word) for word in done.stdout.split()])
    seconds = [f"{median([f[i] for f in found]):.2f}" for i in range(3)]
    return seconds if register else [*seconds[:2], "-"]


def write_safetensors(place: Path) -> None:
    weights: dict[str, str] = {}
    for f in range(FILES):
        name = f"model-{f + 1:05d}-of-{FILES:05d}.safetensors"
        header = {
            f"layers.{f}.w{t}": {
                "dtype": "F32",
                "shape": [4, 8],
                "data_offsets": [128 * t, 128 * (t + 1)],
            }
            for t in range(EACH)
        }
        text = json.dumps(header).encode()
        (place / name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(128 * EACH))
        weights |= dict.fromkeys(header, name)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )


def write_dcp(place: Path) -> None:
    """Chunk `e` of tensor `t` is item `t * EACH + e`, dealt to the files in turn."""
    item = saved(torch.zeros(4, 16))
    tensors, places = {}, {}
    for t in range(FILES):
        name = f"model.layers.{t}.weight"
        offsets = [torch.Size([4 * e, 0]) for e in range(EACH)]
        chunks = [dcp.ChunkStorageMetadata(o, torch.Size([4, 16])) for o in offsets]
        properties = dcp.TensorProperties(dtype=torch.float32)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size([4 * EACH, 16]), chunks)
        for e, offset in enumerate(offsets):
            at, file = divmod(t * EACH + e, FILES)
            places[dcp.MetadataIndex(name, offset, e)] = _StorageInfo(
                f"__{file}_0.distcp", at * len(item), len(item)
            )
    metadata = dcp.Metadata(
        tensors, planner_data={n: tuple(n.split(".", 1)) for n in tensors}, storage_data=places
    )
    metadata.storage_meta = dcp.StorageMeta(str(place), str(uuid.uuid4()))  # as torch's writer does
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    for f in range(FILES):
        (place / f"__{f}_0.distcp").write_bytes(item * EACH)


def saved(tensor: torch.Tensor) -> bytes:
    import io

    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def write_zero(place: Path) -> None:
    arrays = {
        (f"layers.{t}.weight", s): np.zeros((64, 40), np.float32) for t in range(100) for s in FLAT
    }
    write_zero3(place, arrays, 334)


if __name__ == "__main__":
    main()
