"""Filling a module for inference: `load_into` beside safetensors and a raw read of the same file.

`python -m bench.load_into`. A Llama of about 1 GB in bfloat16, saved as a safetensors file and as a
universal checkpoint, is loaded into a module on the meta device and into one on the host,
alternated in one process, from the page cache. The raw read is `readinto` into memory that is
allocated once for each tensor, and kept, as that of the module is. With a CUDA device, a module is
filled there, too; the raw read then copies each tensor from pinned memory.
"""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import OUT, median, table, targets

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
WIDTH, INNER, LAYERS, VOCAB = 2048, 5632, 10, 16000
WAYS = ["raw read", "safetensors, assign", "safetensors.torch.load_model", "load_into HF, meta", "load_into HF, host",
        "load_into HF, float32", "load_into universal, meta", "load_into packed, meta"]  # fmt: skip
ON_CUDA = ["raw read, cuda", "safetensors, cuda", "load_into HF, cuda", "load_into universal, cuda"]


def module(device: str, dtype: str = "bfloat16") -> Any:
    """The matrices of a Llama."""
    import torch

    def linear(a: int, b: int) -> torch.nn.Module:
        return torch.nn.Linear(a, b, bias=False, device=device, dtype=getattr(torch, dtype))

    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, INNER)] * 2 + [(INNER, WIDTH)]
    layers = [torch.nn.ModuleList(linear(*shape) for shape in shapes) for _ in range(LAYERS)]
    return torch.nn.ModuleList([linear(WIDTH, VOCAB), *layers, linear(VOCAB, WIDTH)])


def make() -> None:
    """Save the checkpoints; once."""
    import torch
    from safetensors.torch import save_file

    import ucformat
    import ucformat.torch

    folder = OUT / "serve"
    if (folder / "packed" / "manifest.json").exists():
        return
    model = module("cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p)
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "hf" / "model.safetensors")
    ucformat.convert(folder / "hf", folder / "universal", overwrite=True)
    ucformat.torch.save({"model": model}, folder / "packed", form="packed", overwrite=True)


def raw(file: Path, device: str) -> list[Any]:
    """Read each tensor into memory of its own, in the order of the file."""
    import torch

    pinned = torch.empty(1 << 27, dtype=torch.uint8, pin_memory=True) if device == "cuda" else None
    tensors = []
    with file.open("rb", buffering=0) as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for info in sorted(
            (v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"]
        ):
            nbytes = info["data_offsets"][1] - info["data_offsets"][0]
            tensor = torch.empty(nbytes, dtype=torch.uint8) if pinned is None else pinned[:nbytes]
            view = memoryview(tensor.numpy())
            while view:
                view = view[f.readinto(view) or 0 :]
            tensors.append(tensor.to(device))
    return tensors


def one(way: str) -> dict[str, float]:
    """Load once, after the module is made, and tell seconds and memory."""
    import torch
    from safetensors.torch import load_file, load_model

    import ucformat.torch

    folder = OUT / "serve"
    file = folder / "hf" / "model.safetensors"
    kind, _, target = way.partition(", ")
    place = {"load_into universal": "universal", "load_into packed": "packed"}.get(kind, "hf")
    loads: dict[str, Callable[[Any], object]] = {
        "raw read": lambda _: raw(file, device),
        "safetensors": lambda model: model.load_state_dict(load_file(file, device), assign=True),
        "safetensors.torch.load_model": lambda model: load_model(model, file),
    }
    device = "cuda" if target == "cuda" else "cpu"
    on_host = target in ("host", "float32") or kind.endswith("load_model")
    model = module("cpu" if on_host else "meta", "float32" if target == "float32" else "bfloat16")
    for p in model.parameters():
        if not p.is_meta:
            p.detach().zero_()  # its memory is there, as in a module that is filled again
    load = loads.get(
        kind, lambda model: ucformat.torch.load_into(model, folder / place, device=device)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()
    begun = time.perf_counter()
    loaded = load(model)  # its memory is kept until the time is taken
    for p in model.parameters():  # what is mapped is read now
        if not p.is_meta:
            p.detach().view(-1).view(torch.uint8)[::4096].sum()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    del loaded
    return {"read": seconds, "peak": peak() - before}


def resident() -> float:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> float:
    """The most bytes that this process has had in memory."""
    line = next(
        s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def base(way: str) -> str:
    """The raw read that a way is compared with."""
    return ON_CUDA[0] if way in ON_CUDA else WAYS[0]


def main() -> None:
    import torch

    make()
    ways = WAYS + ON_CUDA * torch.cuda.is_available()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 1):
        for way in ways:
            found[way].append(one(way))
            gc.collect()
    found = {way: of[1:] for way, of in found.items()}  # the first one imports
    nbytes = (OUT / "serve" / "hf" / "model.safetensors").stat().st_size
    seconds = {way: median([r["read"] for r in of]) for way, of in found.items()}
    ratios = {
        way: median([a["read"] / b["read"] for a, b in zip(found[base(way)], of, strict=True)])
        for way, of in found.items()
    }
    rows = [
        [
            way,
            f"{nbytes / 1e9 / seconds[way]:.2f}",
            f"{ratios[way]:.2f}",
            f"{seconds[ON_CUDA[1] if way in ON_CUDA else WAYS[1]] / seconds[way]:.2f}",
            f"{max(r['peak'] for r in of) / 1e6:.0f}",
        ]
        for way, of in found.items()
    ]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(
        f"{nbytes / 1e6:.0f} MB in bfloat16, medians of {ROUNDS} interleaved rounds; load average {load}.\n"
    )
    print(
        table(["", "GB/s", "× raw read", "× safetensors", "peak RSS above the module, MB"], rows)
        + "\n"
    )
    goals = [
        (f"{way} ÷ {base(way)}", ">= 0.95" if way in ON_CUDA else ">= 0.85", ratios[way])
        for way in ways[3:5] + ways[6:8] + ways[10:]
    ]
    print(targets(*goals))


if __name__ == "__main__":
    main()
