"""What chunk grids cost, by planning alone: nothing is read, so the figures are the same on every machine.

`python -m bench.grids`. Tensors of three and four dims of at least 16 MiB are cut into 2 to 16
parts along each dim, as `torch.chunk` does it: bytes that all parts together read ÷ the bytes of
the tensor, beside the bound of ADR 0007. Then the matrices of whole models under tensor parallelism
and FSDP: bytes read ÷ needed, and requests on S3.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from bench.common import table, targets
from ucformat.format.chunking import Grid
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.reading.plan import ReadItem, make_plan
from ucformat.storage.base import Costs
from ucformat.storage.objects import _COSTS as S3

if TYPE_CHECKING:
    from ucformat.reading.plan import Plan, Verify

    Shape = tuple[int, ...]

DTYPES = {2: "bfloat16", 4: "float32"}
SHAPES: list[Shape] = [
    *[(8, 1024, 1024), (16, 1024, 512), (128, 256, 256), (16, 512, 512), (256, 256, 8, 8)],
    *[
        (3, 4096, 4096),
        (5, 2048, 2048),
        (12, 2048, 2048),
        (64, 2048, 1024),
        (256, 7168, 2048),
        (2048, 1024, 3, 3),
    ],
]
MODES: dict[str, tuple[Verify, Costs]] = {
    "default": ("whole", Costs()),
    "verified": ("always", Costs()),
    "unverified": ("never", Costs()),
    "S3, default": ("whole", S3),
}
CUTS = range(2, 17)


def llama(hidden: int, inner: int, layers: int) -> dict[Shape, tuple[int, int | None]]:
    """The weights of Llama 3: how many there are, and the dim along which Megatron-LM cuts them."""
    return {
        (128256, hidden): (2, 0),
        (hidden, hidden): (2 * layers, 0),
        (1024, hidden): (2 * layers, 0),
        (inner, hidden): (2 * layers, 0),
        (hidden, inner): (layers, 1),
    }


MODELS: dict[str, dict[Shape, tuple[int, int | None]]] = {
    "Llama 8B": llama(4096, 14336, 32),
    "Llama 70B": llama(8192, 28672, 80),
    "Llama 405B": llama(16384, 53248, 126),
    "DeepSeek-V3": {
        (129280, 7168): (2, 0),
        (24576, 1536): (61, 0),
        (32768, 512): (61, 0),
        (7168, 16384): (61, 1),
        (256, 2048, 7168): (116, 1),
        (256, 7168, 2048): (58, 2),
    },
}


def plan_part(grid: Grid, dim: int, start: int, stop: int, verify: Verify, costs: Costs) -> Plan:
    """The plan for a part of a tensor along one dim."""
    begin = tuple(start if d == dim else 0 for d in range(len(grid.shape)))
    shape = tuple(stop - start if d == dim else n for d, n in enumerate(grid.shape))
    box = Box(begin, shape)
    info = TensorInfo("x", "weight", DTYPES[grid.itemsize], grid.shape)
    extents = [grid.tiles(shard, str(shard)) for shard in grid.shards(box)]
    return make_plan(
        [ReadItem(info, extents, [(0, Piece(box, 0, row_major(shape)))])], verify, costs
    )


def edges(n: int, degree: int) -> list[int]:
    """Where the parts of a dim begin, and its end."""
    return [*range(0, n, -(-n // degree)), n]


def ratio(grid: Grid, dim: int, degree: int, mode: str) -> float:
    """Bytes that all parts read together ÷ the bytes of the tensor."""
    at = edges(grid.shape[dim], degree)
    read = sum(plan_part(grid, dim, a, b, *MODES[mode]).bytes_read for a, b in pairwise(at))
    return read / (math.prod(grid.shape) * grid.itemsize)


def bound(grid: Grid, dim: int, degree: int) -> float:
    """The bound of ADR 0007: chunks along the dim are read once more for each boundary inside one."""
    inside = sum(a % grid.chunk[dim] != 0 for a in edges(grid.shape[dim], degree)[:-1])
    return 1 + inside / -(-grid.shape[dim] // grid.chunk[dim])


def main() -> None:
    rows, exact, excess = [], 1.0, 1.0
    for shape in SHAPES:
        grid = Grid.of(shape, 4)
        cuts = [(d, k) for d, n in enumerate(shape) for k in CUTS if k <= n]
        bounds = {cut: bound(grid, *cut) for cut in cuts}
        found = {mode: {cut: ratio(grid, *cut, mode) for cut in cuts} for mode in MODES}
        exact = max(
            [exact, *(r for of in found.values() for cut, r in of.items() if bounds[cut] == 1)]
        )
        excess = max([excess, *(r / bounds[cut] for of in found.values() for cut, r in of.items())])
        rows.append(
            [str(shape), str(grid.chunk), f"{sum(b == 1 for b in bounds.values())} of {len(cuts)}"]
            + [f"{max(of.values()):.2f}" for of in found.values()]
            + [f"{max(bounds.values()):.2f}"]
        )
    print(
        "float32, cut into 2 to 16 parts along any one dim: bytes read ÷ needed in the worst case.\n"
    )
    print(table(["shape", "chunk", "cuts at chunk boundaries", *MODES, "bound"], rows) + "\n")
    rows = [[name, dtype, *whole(name, size)] for name in MODELS for size, dtype in DTYPES.items()]
    print(
        "Whole models: bytes read ÷ needed, and requests on S3 in thousands, of all ranks together.\n"
    )
    print(table(["", "dtype", "chunks", *LAYOUTS], rows) + "\n")
    print(
        targets(
            (
                "bytes read ÷ needed where all cuts are at chunk boundaries, the highest",
                "<= 1.02",
                exact,
            ),
            ("elsewhere, ÷ the bound, the highest", "<= 1.02", excess),
        )
    )


#: name -> the degree, and whether rows are cut as by FSDP
LAYOUTS = {"TP 8": (8, False), "TP 16": (16, False), "FSDP 64": (64, True)}


def whole(name: str, size: int) -> list[str]:
    """The chunks of a model, and the cost of each layout."""
    grids = {shape: Grid.of(shape, size) for shape in MODELS[name]}
    chunks = sum(
        MODELS[name][shape][0]
        * math.prod(-(-n // c) for n, c in zip(shape, grid.chunk, strict=True))
        for shape, grid in grids.items()
    )
    out = [f"{chunks:,}"]
    for degree, by_rows in LAYOUTS.values():
        needed = read = requests = 0
        for shape, (count, cut) in MODELS[name].items():
            dim = 0 if by_rows or cut is None else cut
            at = edges(shape[dim], degree)
            for a, b in pairwise(at):
                plan = plan_part(grids[shape], dim, a, b, *MODES["S3, default"])
                needed, read = needed + count * plan.bytes_needed, read + count * plan.bytes_read
                requests += count * plan.ranges
        out.append(f"{read / needed:.3f}; {requests / 1000:.0f} k")
    return out


if __name__ == "__main__":
    main()
