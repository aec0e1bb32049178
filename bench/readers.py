"""What `bench/read.py` runs in processes of their own; each prints a line of JSON.

`readers.py compare SLICE ROUNDS`: seconds of ucformat and of all raw ways to read as many bytes,
alternated, into the same memory. `readers.py cold SLICE ROUNDS`: the same from the disk.
`readers.py READER SLICE [ARGUMENTS]`: seconds, bytes needed and peak memory of one reader, the best
of three repetitions. Opening and planning are part of the time; memory is given.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
PAGES = {"4 KiB pages": mmap.MADV_NOHUGEPAGE, "huge pages": mmap.MADV_HUGEPAGE}


def in_calls(fd: int, view: memoryview, at: int, nbytes: int) -> None:
    """`preadv` of at most so many bytes at once."""
    while view:
        done = os.preadv(fd, [view[:nbytes]], at)
        view, at = view[done:], at + done


def in_vectors(fd: int, view: memoryview, at: int) -> None:
    """`preadv` of 256 vectors of 64 KiB."""
    while view:
        done = os.preadv(
            fd, [view[i : i + (64 << 10)] for i in range(0, min(len(view), 16 << 20), 64 << 10)], at
        )
        view, at = view[done:], at + done


def mapped(fd: int, view: memoryview, at: int) -> None:
    """Map the file, and copy."""
    with mmap.mmap(
        fd, len(view), mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ, offset=at
    ) as file:
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(file, np.uint8))


def into_cache(fd: int, view: memoryview, at: int) -> None:
    """`preadv` of 256 KiB, again and again into the same buffer: what the kernel takes, without the destination."""
    with mmap.mmap(
        -1, 256 << 10
    ) as buffer:  # begins with a page: some processors copy slowly elsewhere
        for offset in range(at, at + len(view), len(buffer)):
            os.preadv(fd, [buffer], offset)


#: name -> reads the bytes of a file from an offset into memory
RAW: dict[str, Callable[[int, memoryview, int], None]] = {
    "one call": partial(in_calls, nbytes=1 << 40),
    "calls of 4 MiB": partial(in_calls, nbytes=4 << 20),
    "calls of 1 MiB": partial(in_calls, nbytes=1 << 20),
    "`preadv`, 64 KiB": in_vectors,
    "`mmap` + copy": mapped,
}


#: Not a way to read into memory, but a bound of all that do not map the file.
NOWHERE = "256 KiB into the cache"


def raw(
    out: Any, read: Callable[[int, memoryview, int], None], threads: int, flags: int = 0
) -> None:
    """As many bytes from the front of a file, each thread its part."""
    view = memoryview(out).cast("B")
    part = len(view) // threads
    fd = os.open(OUT / "tensor.bin", os.O_RDONLY | flags)
    try:
        if threads == 1:
            read(fd, view, 0)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda k: read(fd, view[k * part : (k + 1) * part], k * part), range(threads)
                )
            )
    finally:
        os.close(fd)


def touched(what: str, advice: int) -> Any:
    """Memory for a slice, aligned to 2 MiB, all of whose pages are there."""
    nbytes, huge = int(np.prod(SHAPES[what])) * 4, 2 << 20
    # not shared, which is the default: shared memory has huge pages only if the system is set up so
    memory = mmap.mmap(-1, nbytes + huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
    memory.madvise(advice, begin, nbytes)
    out = np.frombuffer(memory, np.float32, nbytes // 4, begin).reshape(SHAPES[what])
    out[...] = 1
    return out


def compare(what: str, rounds: str) -> dict[str, dict[str, list[float]]]:
    """By pages and name of the reader, the seconds of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for pages, advice in PAGES.items():
        out = touched(what, advice)
        acts: dict[str, Callable[[], None]] = {}
        for n in (1, 2):
            label = f"{n} thread" + "s" * (n > 1)
            acts |= {f"{name}, {label}": partial(raw, out, read, n) for name, read in RAW.items()}
            acts[f"{NOWHERE}, {label}"] = partial(raw, out, into_cache, n)
            for kind, verify in (("unverified", "never"), ("verified", "whole")):
                acts[f"ucformat {kind}, {label}"] = partial(ours, out, what, str(n), verify)
        times: dict[str, list[float]] = defaultdict(list)
        for number in range(int(rounds) + 1):
            for name, act in acts.items():
                seconds = timed(act)
                if number:  # the first warms the caches
                    times[name].append(seconds)
        check(out, what)
        found[pages] = times
    return found


def cold(what: str, rounds: str) -> dict[str, list[float]]:
    """The seconds of each round, by name of the reader; nothing of the files is in the page cache before each."""
    out = touched(what, mmap.MADV_HUGEPAGE)
    acts: dict[str, Callable[[], None]] = {
        "calls of 4 MiB, 2 threads": partial(raw, out, RAW["calls of 4 MiB"], 2),
        "the same, `O_DIRECT`": partial(raw, out, RAW["calls of 4 MiB"], 2, os.O_DIRECT),
        "the same, 4 threads": partial(raw, out, RAW["calls of 4 MiB"], 4, os.O_DIRECT),
        "ucformat verified": partial(ours, out, what, "4", "whole"),
    }
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(int(rounds)):
        for name, act in acts.items():
            for file in [
                OUT / "tensor.bin",
                *(p for p in (OUT / "universal").rglob("*") if p.is_file()),
            ]:
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            times[name].append(timed(act))
    check(out, what)
    return times


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def check(out: Any, what: str) -> None:
    """What ucformat read last is equal to the tensor."""
    expected = np.memmap(OUT / "tensor.bin", np.float32, "r", shape=(SIZE, SIZE))[BOXES[what]]
    assert np.array_equal(out[::97, ::89], expected[::97, ::89])


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
    table = manifest["tensors"]
    path = OUT / "universal" / table["kinds"][0]["path"] / table["names"][0]
    store = ts.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path.absolute())}}
    ).result()
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
            return LoadPlan(
                create_read_items_for_chunk_list(
                    "w", self.metadata.state_dict_metadata["w"], [chunk]
                )
            )

        def resolve_tensor(self, read_item: Any) -> Any:
            return tensor[
                tuple(
                    slice(o, o + n)
                    for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True)
                )
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
    "ours": ours,
    "tensorstore": tensorstore,
    "safetensors": safetensors,
    "dcp": dcp,
}


def main() -> None:
    reader, what, *arguments = sys.argv[1:]
    if reader == "make":
        make(*map(int, arguments))
    elif reader in ("compare", "cold"):
        print(json.dumps({"compare": compare, "cold": cold}[reader](what, *arguments)))
    else:
        out = np.zeros(SHAPES[what], np.float32)
        out[...] = 1  # its pages are there
        before = peak()
        seconds = min(timed(partial(READERS[reader], out, what, *arguments)) for _ in range(3))
        after = peak()
        check(out, what)
        print(json.dumps({"seconds": seconds, "needed": out.nbytes, "peak": after - before}))


def peak() -> int:
    """The most memory that this process has held, in bytes. Not `ru_maxrss`, which begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


if __name__ == "__main__":
    main()
