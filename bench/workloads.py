"""One workload, timed in this process by the public interface alone: `python bench/workloads.py NAME FOLDER`.

`bench.commits` runs it with the package of each commit. It prints the seconds that passed and those
of the processor.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS, _COLUMNS = 8192, 4096  # 128 MiB of float32


def _source(folder: Path) -> Path:
    """A safetensors file of a large tensor and 1,000 small ones."""
    import numpy as np
    from safetensors.numpy import save_file

    file = folder / "source" / "model.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True)
        random = np.random.default_rng(0)
        tensors = {f"layers.{n}.weight": random.random((64, 64), np.float32) for n in range(1000)}
        save_file(tensors | {"embedding": random.random((_ROWS, _COLUMNS), np.float32)}, file)
    return file.parent


def _universal(folder: Path) -> Path:
    """The same as a universal checkpoint."""
    import ucformat

    made = folder / "universal"
    if not made.exists():
        ucformat.convert(_source(folder), made)
    return made


def _convert(folder: Path) -> Callable[[], object]:
    import ucformat

    source = _source(folder)
    return lambda: ucformat.convert(source, folder / "converted", overwrite=True)


def _open(folder: Path) -> Callable[[], object]:
    import ucformat

    url = _universal(folder)
    return lambda: [ucformat.open(url).tensors for _ in range(20)]


def _read(folder: Path) -> Callable[[], object]:
    import ucformat

    tensor = ucformat.open(_universal(folder))["embedding"]
    return lambda: [tensor[:, d * _COLUMNS // 8 : (d + 1) * _COLUMNS // 8] for d in range(8)]


def _read_small(folder: Path) -> Callable[[], object]:
    import ucformat

    found = ucformat.open(_universal(folder))
    return lambda: [found[f"layers.{n}.weight"][:32] for n in range(1000)]


def _verify(folder: Path) -> Callable[[], object]:
    import ucformat

    url = _universal(folder)
    return lambda: ucformat.verify(url)


def _list(folder: Path) -> Callable[[], object]:
    command = [sys.executable, "-m", "ucformat.cli", "show", str(_universal(folder))]
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _state() -> dict[str, object]:
    import torch

    torch.manual_seed(0)
    return {f"layers.{n}": torch.rand(1024, 1024) for n in range(32)} | {
        f"norms.{n}": torch.rand(64) for n in range(500)
    }


def _save(form: str) -> Callable[[Path], Callable[[], object]]:
    def prepare(folder: Path) -> Callable[[], object]:
        import ucformat.torch

        state = _state()
        return lambda: ucformat.torch.save(state, folder / form, form=form, overwrite=True)  # type: ignore[arg-type]

    return prepare


_SAVES = 20  # of a small state, in each timing


def _save_together(form: str, ranks: int) -> Callable[[Path], Callable[[], object]]:
    """Saves of a small state by several processes of this machine, of which this one is rank 0."""

    def prepare(folder: Path) -> Callable[[], object]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        import ucformat.torch  # noqa: F401 - the other ranks are forked with it

        url = folder / f"{form}-{ranks}"
        for rank in range(1, ranks):
            if not os.fork():
                timed = _rank(rank, ranks, port, url, form)
                for _ in range(2):  # as `main` does
                    timed()
                os._exit(0)
        return _rank(0, ranks, port, url, form)

    return prepare


def _rank(rank: int, ranks: int, port: int, url: Path, form: str) -> Callable[[], object]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    import ucformat.torch

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    state = {
        f"layers.{n}": distribute_tensor(torch.rand(64, 64), mesh, [Shard(0)]) for n in range(100)
    }
    state |= {
        f"norms.{n}": distribute_tensor(torch.rand(64), mesh, [Replicate()]) for n in range(20)
    }

    def timed() -> None:
        for _ in range(_SAVES):
            ucformat.torch.save(state, url, form=form, overwrite=True)  # type: ignore[arg-type]

    return timed


def _load(form: str) -> Callable[[Path], Callable[[], object]]:
    def prepare(folder: Path) -> Callable[[], object]:
        import ucformat.torch

        state, url = _state(), folder / f"saved-{form}"
        if not url.exists():
            ucformat.torch.save(state, url, form=form)  # type: ignore[arg-type]
        return lambda: ucformat.torch.load(state, url)

    return prepare


#: name -> what prepares the workload in a folder, and gives what is timed.
WORKLOADS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "convert": _convert,
    "open": _open,
    "read columns": _read,
    "read small": _read_small,
    "verify": _verify,
    "ucp show": _list,
    "save zarr": _save("zarr"),
    "save packed": _save("packed"),
    **{
        f"save {form}, {n} ranks": _save_together(form, n)
        for form in ("zarr", "packed")
        for n in (2, 4)
    },
    "load zarr": _load("zarr"),
    "load packed": _load("packed"),
}


def _used() -> float:
    """Seconds of the processor, those of ended children too."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    timed = WORKLOADS[sys.argv[1]](folder)
    timed()  # what is imported late, and the page cache
    begun, used = time.perf_counter(), _used()
    timed()
    print(json.dumps({"seconds": time.perf_counter() - begun, "processor": _used() - used}))


if __name__ == "__main__":
    main()
