"""Publishing weights: bytes and seconds of each version, beside a whole save and load.

`python -m bench.publish`. The model has 214 MB of bfloat16 in the shapes of a layer of 7 billion parameters. Before
each version, every element of its float32 copy moves by up to 1e-6, as with Adam at that learning rate. A receiver
verifies what it has after each version, as the load does that stands beside it. The bytes of a receiver of one eighth
of the rows are all that its process reads from files, documents and indexes included; its share is an eighth of the
bytes that the version has stored of tensors. Seconds are those of the processor, whatever the storage takes besides.
Figures are medians of the versions that are patches.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.common import OUT, table, targets
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece
from ucformat.reading.execute import ReadOptions
from ucformat.references import open_reference
from ucformat.torch import Publisher, load, save, subscribe
from ucformat.torch.comm.group import single_process_group
from ucformat.torch.loading.match import Matched
from ucformat.torch.publishing.patches import CurrentVersion, PatchFill
from ucformat.torch.state.local import LocalShard

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, torch.Tensor]

SHAPES = {"attention": (4096, 4096), "gate": (11008, 4096), "up": (11008, 4096), "norm": (4096,)}
VERSIONS = 6
RECEIVERS = 8


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=OUT))
    try:
        measure(folder)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    masters = {n: torch.randn(s, generator=generator) * 0.02 for n, s in SHAPES.items()}
    model = {name: master.bfloat16() for name, master in masters.items()}
    other, received = ({n: torch.zeros_like(t) for n, t in model.items()} for _ in range(2))
    nbytes = sum(tensor.nbytes for tensor in model.values())
    publisher, subscription = Publisher(folder / "channel"), subscribe(folder / "channel")
    seconds: dict[str, list[float]] = {"save": [], "load": [], "publish": [], "update": []}
    stored, shares = [], []

    def timed(what: str, call: Callable[[], object]) -> None:
        begun = time.process_time()
        call()
        seconds[what].append(time.process_time() - begun)

    place, last = folder / "whole", ""
    for version in range(VERSIONS):
        for name, master in masters.items():
            step = torch.rand(master.shape, generator=generator).mul_(2e-6).sub_(1e-6)
            model[name].copy_(master.add_(step))
        timed("save", lambda: save({"model": model}, place, form="packed"))
        timed("load", lambda: load({"model": other}, place, certify=True))
        shutil.rmtree(place)
        before = {name: tensor.clone() for name, tensor in received.items()}
        timed("publish", lambda: publisher.publish({"model": model}))
        timed("update", lambda: subscription.update({"model": received}))
        assert all(torch.equal(received[name], tensor) for name, tensor in model.items())
        newest = str(folder / "channel" / f"v-{version + 1:08d}")
        if version:
            files = (f for f in Path(newest, "data").rglob("*") if f.is_file())
            stored.append(sum(f.stat().st_size for f in files))
            read = bytes_of_part(last, newest, before, model, version % RECEIVERS)
            shares.append(read / (stored[-1] / RECEIVERS))
        last = newest
    report(nbytes, stored, shares, {what: s[1:] for what, s in seconds.items()})


def bytes_of_part(last: str, newest: str, before: State, after: State, part: int) -> int:
    """The bytes that a receiver of one eighth of the rows reads to have the next version."""
    ck = open_reference(last)
    current = CurrentVersion(0, ck.id, ck.metadata.fingerprints, frozenset())
    matched, expected = [], []
    infos = {key.name: info for key, info in ck.tensors.items()}
    for name, tensor in before.items():
        rows = len(tensor) // RECEIVERS
        own = tensor[part * rows : (part + 1) * rows].clone()
        box = Box((part * rows, *(0 for _ in own.shape[1:])), tuple(own.shape))
        piece = Piece(box, 0, row_major(tuple(own.shape)))
        matched.append(Matched(LocalShard(infos[name], (piece,), own), infos[name]))
        expected.append(after[name][part * rows : (part + 1) * rows])
    fill = PatchFill(current, single_process_group(), lambda: None)
    begun = bytes_read()
    fill(open_reference(newest), matched, single_process_group(), None, ReadOptions())
    read = bytes_read() - begun
    assert all(
        torch.equal(m.target.tensor, tensor) for m, tensor in zip(matched, expected, strict=True)
    )
    return read


def bytes_read() -> int:
    """What this process has read by system calls so far."""
    (read,) = re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(read)


def report(
    nbytes: int, stored: list[int], shares: list[float], seconds: dict[str, list[float]]
) -> None:
    median = {what: statistics.median(s) for what, s in seconds.items()}
    patch = statistics.median(stored)
    print(
        table(
            ["", "MB", "trainer, processor s", "receiver, processor s"],
            [
                ["whole", f"{nbytes / 1e6:.0f}", f"{median['save']:.2f}", f"{median['load']:.2f}"],
                [
                    "published",
                    f"{patch / 1e6:.1f}",
                    f"{median['publish']:.2f}",
                    f"{median['update']:.2f}",
                ],
            ],
        )
    )
    print()
    print(
        targets(
            ("bytes of a version / of its tensors", "<= 0.06", patch / nbytes),
            ("bytes read for 1/8 of the rows / their share", "<= 1.1", statistics.median(shares)),
        )
    )


if __name__ == "__main__":
    main()
