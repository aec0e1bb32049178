"""Ranks that save to tiers and restore from one of them, for `bench/tiers.py`."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.certify import drop_pages
from tests.torch.tiers.life import FAST, enter
from ucformat.torch import Manager, Tier

TENSORS = 16


def state_of(mib: int, seed: int) -> dict[str, Any]:
    """Tensors that are cut over both ranks; each rank holds half."""
    mesh = init_device_mesh("cpu", (2,))
    rows = (mib << 20) // TENSORS // 4 // 1024 // 2
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    return {
        f"w{n}": DTensor.from_local(
            torch.randn(rows, 1024, generator=generator) if seed else torch.zeros(rows, 1024),
            mesh,
            [Shard(0)],
        )
        for n in range(TENSORS)
    }


def saved(folder: Path, mib: int, disk: str, s3: str) -> None:
    """Save one step to all tiers."""
    place = folder.parent
    enter(place, f"node{dist.get_rank()}")
    tiers = [Tier(FAST, every=1, keep=1), Tier(disk, every=1)]
    with Manager(s3, every=1, tiers=tiers, signals=()) as manager:
        manager.save(1, state_of(mib, 1))
        manager.wait()


def measured(folder: Path, what: str, mib: int, disk: str, s3: str) -> float:
    """The seconds of one way."""
    rank = dist.get_rank()
    if what == "copied":
        source = np.ones(mib << 19, np.uint8)
        target = np.zeros_like(source)
        dist.barrier()
        begun = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - begun
    if what == "sent":
        return sent(folder.parent / f"node{rank}" / "ck", mib << 19)
    state = state_of(mib, 0)
    node = f"node{1 - rank}" if what == "other" else f"node{rank}"
    enter(folder.parent, node)
    if what in ("own", "other"):
        manager = Manager(f"{disk}-none", every=1, tiers=[Tier(FAST, every=1, keep=1)], signals=())
    else:
        if what == "disk":
            drop_pages(Path(disk))
        manager = Manager({"disk": disk, "s3": s3}[what], signals=())
    dist.barrier()
    begun = time.perf_counter()
    report = manager.restore_latest(state, verify="quick")
    seconds = time.perf_counter() - begun
    if not report or not state["w0"].to_local().any():
        raise SystemExit(f"{what}: nothing was restored")
    manager.close()
    return seconds


def sent(place: Path, nbytes: int) -> float:
    """Send a file of this node to the other rank, and receive one of it, as a restore does."""
    (file,) = place.glob("step-*/data/*/*.bin")
    target = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports: list[Any] = [None, None]
        dist.all_gather_object(ports, server.getsockname()[1])

        def send() -> None:
            connection, _ = server.accept()
            with connection, file.open("rb") as data:
                offset = 0
                while offset < nbytes:
                    done = os.sendfile(connection.fileno(), data.fileno(), offset, nbytes - offset)
                    if not done:
                        break
                    offset += done

        thread = threading.Thread(target=send)
        thread.start()
        with socket.create_connection(("127.0.0.1", ports[1 - dist.get_rank()])) as connection:
            dist.barrier()
            begun = time.perf_counter()
            received = 0
            while received < nbytes:
                received += connection.recv_into(target[received:])
            seconds = time.perf_counter() - begun
        thread.join()
    return seconds
