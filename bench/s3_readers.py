"""Readers of `bench/s3.py`: `s3_readers.py READERS LAYOUT ENDPOINT URL ROUNDS` prints what each round of each took.

Each round opens the checkpoint anew and reads a rank's part into memory that is there; several
readers take turns in one process. A first round, which connects, warms caches and is checked, does
not count.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.s3_model import DTYPE, RANK, WAYS, check, cut, dim_of, layout_of, local_shape, shapes
from tests.s3_files import BUCKET, Served
from ucformat.reading.dtypes import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    Out = dict[str, Any]
    Timed = dict[str, float]


class Ours:
    """A rank's plan."""

    def __init__(self, url: str, layout: str) -> None:
        import ucformat

        self.url, self.layout = f"{url}/universal", layout_of(layout)
        self.open: Callable[[str], Any] = ucformat.open

    def read(self, out: Out) -> Timed:
        begun = time.perf_counter()
        ck = self.open(self.url)
        opened = time.perf_counter()
        plan = ck.plan(self.layout, RANK)
        planned = time.perf_counter()
        plan.execute(into={(name, "weight"): a for name, a in out.items()})
        return {
            "open": opened - begun,
            "execute": time.perf_counter() - planned,
            "needed": plan.bytes_needed,
            "planned": plan.requests,
            "unverified": plan.bytes_unverified,
        }


class Fsspec(Ours):
    """The same plan through s3fs."""

    def __init__(self, url: str, layout: str) -> None:
        import fsspec

        from ucformat.storage.fsspec_store import FsspecStore

        super().__init__(url, layout)
        files, own = fsspec.filesystem("s3", **S3FS), self.open

        def through(url: str) -> Any:
            return own(FsspecStore(url, files))  # type: ignore[arg-type] # it takes stores, too

        self.open = through


class Raw:
    """obstore's `get_ranges` of the ranges of our plan, several files at once; the bytes are left where they come.

    It keeps its connections, as stores of one process do.
    """

    def __init__(self, url: str, layout: str, threads: int = 32) -> None:
        from obstore.store import S3Store

        ours = Ours(url, layout)
        plan = ours.open(ours.url).plan(ours.layout, RANK)
        bucket, _, prefix = ours.url.removeprefix("s3://").partition("/")
        options: dict[str, Any] = {"endpoint": ENDPOINT, "region": "us-east-1"} if ENDPOINT else {}
        self.client = S3Store(bucket, prefix=prefix, client_options={"allow_http": True}, **options)
        self.files: dict[str, tuple[list[int], list[int]]] = {}
        self.threads = threads
        for r in plan.plan.requests:
            starts, lengths = self.files.setdefault(r.file, ([], []))
            for k in range(r.count):
                starts.append(r.offset + k * r.step)
                lengths.append(r.nbytes)

    def read(self, out: Out) -> Timed:  # noqa: ARG002 - as the others
        import obstore

        def one(file: str) -> None:
            starts, lengths = self.files[file]
            obstore.get_ranges(self.client, file, starts=starts, lengths=lengths, coalesce=0)

        begun = time.perf_counter()
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(one, self.files))
        return {"execute": time.perf_counter() - begun}


class Zarr:
    """zarr-python over s3fs, on the arrays of the same checkpoint."""

    def __init__(self, url: str, layout: str, threads: int = 8) -> None:
        import ucformat

        ucformat.register_zarr_dtypes()
        ck = ucformat.open(f"{url}/universal")
        self.paths = {
            t.name: str(t.path).removeprefix(f"data/{ck.manifest.attempt}/")
            for t in ck.manifest.tensors
        }
        self.url, self.layout, self.threads = ck.zarr_url, layout, threads

    def read(self, out: Out) -> Timed:
        import zarr
        from zarr.storage import FsspecStore

        store = FsspecStore.from_url(str(self.url), storage_options=S3FS, read_only=True)
        group = zarr.open_group(store, mode="r", use_consolidated=False)

        def one(name: str) -> None:
            array: Any = group[self.paths[name]]
            out[name][...] = array[cut(name, self.layout)]

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(one, out))
        return {}


class Dcp:
    """PyTorch's DCP through its FsspecReader over s3fs: into DTensors of one rank of eight, as in training."""

    def __init__(self, url: str, layout: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.set_num_threads(1)
        dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WAYS)
        self.mesh = init_device_mesh("cpu", (WAYS,))
        self.url, self.layout = f"{url}/dcp", layout

    def read(self, out: Out) -> Timed:
        import torch
        import torch.distributed.checkpoint as dist_cp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.tensor import DTensor, Replicate, Shard

        state = {}
        for name, a in out.items():
            dim = dim_of(name, self.layout)
            place = Replicate() if dim is None else Shard(dim)
            local = torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
            state[name] = DTensor.from_local(local, self.mesh, [place], run_check=False)
        reader = FsspecReader(self.url, **S3FS)
        dist_cp.load(state, storage_reader=reader, no_dist=True)
        return {}


READERS: dict[str, Callable[[str, str], Any]] = {
    "ours": Ours,
    "raw": Raw,
    "fsspec": Fsspec,
    "zarr": Zarr,
    "dcp": Dcp,
}
ENDPOINT = sys.argv[3] if sys.argv[3:] else ""
S3FS: dict[str, Any] = {"endpoint_url": ENDPOINT} if ENDPOINT else {}


def main() -> None:
    names, layout, _, url, rounds = sys.argv[1:]
    served = Served(ENDPOINT) if url == f"s3://{BUCKET}" else None
    out = {name: np.empty(local_shape(name, layout), numpy_dtype(DTYPE)) for name in shapes()}
    for a in out.values():
        a.view(np.uint16)[...] = 1  # its pages are there
    before = peak()
    readers = {name: READERS[name](url, layout) for name in names.split(",")}
    found: dict[str, list[Timed]] = {name: [] for name in readers}
    for round_ in range(int(rounds) + 1):
        for name, reader in readers.items():
            if served:
                served.counts()
            begun, busy = time.perf_counter(), time.process_time()
            more = reader.read(out)
            took = {
                "seconds": time.perf_counter() - begun,
                "cpu": time.process_time() - busy,
                **more,
            }
            if served:
                counts = served.counts()
                took |= {
                    "requests": counts.requests,
                    "reads": counts.reads,
                    "nbytes": counts.nbytes,
                }
            if round_:
                found[name].append(took)
            elif name != "raw":
                after = peak()
                check(out, layout)
    print(
        json.dumps(
            {
                "peak": (after if len(readers) == 1 and "raw" not in readers else peak()) - before,
                **found,
            }
        )
    )


def peak() -> int:
    """The most memory that this process has held, in bytes. Not `ru_maxrss`, which begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


if __name__ == "__main__":
    main()
