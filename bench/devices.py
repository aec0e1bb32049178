"""Devices: what is read into them, staged from them and fingerprinted there, beside copies that do nothing else.

`python -m bench.devices`, in less than 5 minutes on a machine with an accelerator. The module and the
checkpoints of `bench.load_into` (1.2 GB in bfloat16, in the page cache), alternated rounds in one
process. *Read, then copy* reads each tensor with `readinto` into pinned memory and copies it; *read
while copying* reads blocks of 16 MiB with as many threads as the loader has into a ring of pinned
memory, and copies one while the next are read. What is staged is compared with the device's own copy
of the same tensors to pinned memory, as is the certificate, which needs no such copy.
"""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

import ucformat.torch
from bench import load_into
from bench.common import OUT, median, table, targets
from ucformat.reading.execute import default_threads
from ucformat.torch.saving.background import HostBuffer, room_for, stage
from ucformat.torch.state.fingerprint import pieces_fingerprints
from ucformat.torch.state.local import local_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROUNDS = 7
BLOCK = 16 << 20
SLOTS = 4
FORMS = ("universal", "packed", "hf")
READ, RING, COPY = "read, then copy", "read while copying", "copy to pinned memory"


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("this needs an accelerator: there is none")
    run(device, torch.accelerator.synchronize)


def run(device: torch.device, synchronize: Callable[[], object]) -> None:
    """Measure everything on one device."""
    load_into.make()
    folder = OUT / "serve"
    file = folder / "hf" / "model.safetensors"
    model = load_into.module(str(device))
    parameters = [p.detach() for p in model.parameters()]
    nbytes = sum(p.nbytes for p in parameters)
    ring = [pinned(BLOCK) for _ in range(SLOTS)]
    memory = torch.empty(file.stat().st_size, dtype=torch.uint8, device=device)
    copies = [(pinned(p.nbytes).view(p.dtype).view(p.shape), p) for p in parameters]
    state = local_state({"model": model})
    buffer = HostBuffer(room_for(state))
    pool = ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))))

    def copy_to_host() -> None:
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        synchronize()

    ways: dict[str, Callable[[], object]] = {
        READ: lambda: read_then_copy(file, parameters, ring[0]),
        RING: lambda: read_while_copying(file, memory, ring),
        **{f"load_into, {f}": partial(ucformat.torch.load_into, model, folder / f) for f in FORMS},
        COPY: copy_to_host,
        "staging of async_save": lambda: stage(state, buffer, pool),
        "fingerprints": lambda: pieces_fingerprints(
            (t, p) for t in state.tensors for p in t.pieces
        ),
        "certify": lambda: ucformat.torch.certify({"model": model}, folder / "packed").checked(),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 1):
        for way, act in ways.items():
            synchronize()
            begun = time.perf_counter()
            act()
            synchronize()
            seconds[way].append(time.perf_counter() - begun)
    seconds = {way: each[1:] for way, each in seconds.items()}  # the first one pins memory
    pool.shutdown()
    buffer.close()

    def ratio(way: str, limit: str) -> float:
        return median([b / a for a, b in zip(seconds[way], seconds[limit], strict=True)])

    best = min(READ, RING, key=lambda way: median(seconds[way]))
    limits = {way: best if way in (READ, RING) or "load_into" in way else COPY for way in ways}
    rows = [
        [way, f"{nbytes / 1e9 / median(each):.2f}", f"{ratio(way, limits[way]):.2f}", limits[way]]
        for way, each in seconds.items()
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(f"{name}; {nbytes / 1e6:.0f} MB, medians of {ROUNDS} alternated rounds.\n")
    print(table(["", "GB/s", "× limit", "limit"], rows) + "\n")
    staged = 1 / ratio("staging of async_save", COPY)
    goals = [
        *((f"load_into, {f} ÷ {best}", ">= 0.95", ratio(f"load_into, {f}", best)) for f in FORMS),
        (f"staging of async_save, × {COPY}", "<= 1.1", staged),
        (f"fingerprints ÷ {COPY}", ">= 1", ratio("fingerprints", COPY)),
    ]
    print(targets(*goals))


def pinned(nbytes: int) -> torch.Tensor:
    """Host memory of the fastest copies."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


def read_then_copy(file: Path, parameters: list[torch.Tensor], slot: torch.Tensor) -> None:
    """Read a file tensor by tensor, in one thread, and copy each block when it is read."""
    with file.open("rb", buffering=0) as f:
        f.seek(file.stat().st_size - sum(p.nbytes for p in parameters))
        for parameter in parameters:
            target = parameter.view(-1).view(torch.uint8)
            for begin in range(0, target.numel(), BLOCK):
                part = target[begin : begin + BLOCK]
                view = memoryview(slot[: part.numel()].numpy())
                while view:
                    view = view[f.readinto(view) or 0 :]
                part.copy_(slot[: part.numel()])


def read_while_copying(file: Path, memory: torch.Tensor, ring: list[torch.Tensor]) -> None:
    """Read blocks of a file in threads, and copy one while the next are read."""
    fd = os.open(file, os.O_RDONLY)
    threads = default_threads()
    reading: deque[tuple[int, list[Future[None]]]] = deque()

    def read(slot: memoryview, at: int) -> None:
        while slot:
            done = os.preadv(fd, [slot], at)
            slot, at = slot[done:], at + done

    events: list[torch.Event | None] = [None] * len(ring)
    with ThreadPoolExecutor(threads) as pool:

        def copy_next() -> None:
            at, reads = reading.popleft()
            for each in reads:
                each.result()
            part = memory[at : at + BLOCK]
            number = at // BLOCK % len(ring)
            part.copy_(ring[number][: part.numel()], non_blocking=True)
            if memory.device.type != "cpu":
                events[number] = torch.accelerator.current_stream(memory.device).record_event()

        for at in range(0, memory.numel(), BLOCK):
            number = at // BLOCK % len(ring)
            if (event := events[number]) is not None:
                event.synchronize()
            view = memoryview(ring[number].numpy())[: min(BLOCK, memory.numel() - at)]
            step = -(-len(view) // threads)
            cuts = range(0, len(view), step)
            reading.append((at, [pool.submit(read, view[c : c + step], at + c) for c in cuts]))
            if len(reading) == len(ring) - 1:
                copy_next()
        while reading:
            copy_next()
    os.close(fd)


if __name__ == "__main__":
    main()
