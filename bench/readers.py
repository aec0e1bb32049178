"""One reader of `bench/read.py`: `readers.py READER SLICE [ARGUMENTS]` prints seconds, bytes needed and peak memory.

Opening and planning are part of the time; memory is given. The best of three repetitions counts: the first warms the
caches.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Path("bench/out")
SIZE = 16384
EIGHTH = SIZE // 8
BOXES = {
    "dim 0": (slice(EIGHTH, 2 * EIGHTH), slice(None)),
    "dim 1": (slice(None), slice(EIGHTH, 2 * EIGHTH)),
    "all": (slice(None), slice(None)),
}
SHAPES = {"dim 0": (EIGHTH, SIZE), "dim 1": (SIZE, EIGHTH), "all": (SIZE, SIZE)}


def raw(out: Any, what: str, threads: str) -> None:
    """As many bytes from the front of a file, each thread its part."""
    n, view = int(threads), memoryview(out).cast("B")
    assert len(view) <= SIZE * SIZE * 4, what
    part = len(view) // n

    def work(k: int) -> None:
        with open(OUT / "tensor.bin", "rb", buffering=0) as file:  # noqa: PTH123 - unbuffered
            file.seek(k * part)
            mine = view[k * part : (k + 1) * part]
            while mine:
                mine = mine[file.readinto(mine) :]

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(work, range(n)))


def ours(out: Any, what: str, threads: str, verify: str) -> None:
    """A rank's plan of a layout that cuts the dim in eight."""
    import ucformat

    ck = ucformat.open(OUT / "universal")
    place: list[Any] = ["replicate"] if what == "all" else [{"shard": int(what[-1]), "over": "tp"}]
    layout = ucformat.Layout(mesh={"tp": 8}, rules=[{"match": "*", "place": place}])
    ck.plan(layout, 1, verify=verify).execute(into={("w", "weight"): out}, threads=int(threads))  # type: ignore[arg-type]


def tensorstore(out: Any, what: str) -> None:
    """TensorStore on the same universal checkpoint, into existing memory."""
    import tensorstore as ts

    manifest = json.loads((OUT / "universal" / "manifest.json").read_text())
    path = OUT / "universal" / manifest["tensors"][0]["path"]
    store = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path.absolute())}}).result()
    view = ts.array(out, copy=False, write=True)
    view.write(store[BOXES[what]][ts.d[:].translate_to[0]]).result()


def safetensors(out: Any, what: str) -> None:
    """A slice, then a copy into existing memory."""
    from safetensors import safe_open

    with safe_open(OUT / "tensor.safetensors", "numpy") as file:
        out[...] = file.get_slice("w")[BOXES[what]]


def dcp(out: Any, what: str) -> None:
    """PyTorch's DCP, asked for the slice as a rank that holds just that would ask."""
    import torch
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Slice(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            starts = [s.start or 0 for s in BOXES[what]]
            chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(SHAPES[what]))
            return LoadPlan(create_read_items_for_chunk_list("w", self.metadata.state_dict_metadata["w"], [chunk]))

        def resolve_tensor(self, read_item: Any) -> Any:
            return tensor[
                tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
            ]

    tensor = torch.from_numpy(out)
    dist_cp.load({"w": tensor}, checkpoint_id=OUT / "dcp", planner=Slice(), no_dist=True)


def make(rows: int, columns: int) -> None:
    """The peers' files of `tensor.bin`."""
    import torch
    import torch.distributed.checkpoint as dist_cp
    from safetensors.torch import save_file

    if (OUT / "dcp" / ".metadata").exists() and (OUT / "tensor.safetensors").exists():
        return
    tensor = torch.from_numpy(np.fromfile(OUT / "tensor.bin", np.float32).reshape(rows, columns))
    save_file({"w": tensor}, OUT / "tensor.safetensors")
    dist_cp.save({"w": tensor}, checkpoint_id=OUT / "dcp", no_dist=True)


READERS: dict[str, Callable[..., None]] = {
    "raw": raw,
    "ours": ours,
    "tensorstore": tensorstore,
    "safetensors": safetensors,
    "dcp": dcp,
}


def main() -> None:
    reader, what, *arguments = sys.argv[1:]
    if reader == "make":
        make(*map(int, arguments))
        return
    out = np.zeros(SHAPES[what], np.float32)
    out[...] = 1  # its pages are there
    before = peak()
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        READERS[reader](out, what, *arguments)
        seconds.append(time.perf_counter() - begun)
    after = peak()
    if reader != "raw":
        expected = np.memmap(OUT / "tensor.bin", np.float32, "r", shape=(SIZE, SIZE))[BOXES[what]]
        assert np.array_equal(out[::97, ::89], expected[::97, ::89])
    print(json.dumps({"seconds": min(seconds), "needed": out.nbytes, "peak": after - before}))


def peak() -> int:
    """The most memory that this process has held, in bytes. Not `ru_maxrss`, which begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


main()
