"""A rank of eight reads its part of a 1 GB checkpoint from S3, against raw requests, s3fs and PyTorch's DCP.

`python -m bench.s3`. Everything is served over HTTP on this machine by `tests/s3_files.py`, once as
fast as it answers and once 20 ms later, as S3 does. `UCP_BENCH_S3=s3://BUCKET/PATH` takes a real
place instead, at which a copy of `bench/out/s3` lies; then nobody counts requests. Readers are
processes of their own (`bench/s3_readers.py`), and ours and raw `get_ranges` take turns in one,
too.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.common import OUT, median, ours, run, table, targets
from bench.s3_model import LAYOUTS, least_requests, made, make_universal, shapes
from tests.s3 import ENVIRONMENT
from tests.s3_files import serving_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    Found = dict[tuple[str, str], list[dict[str, Any]]]

ROUNDS = 3
TURNS = 5  # of two readers in one process
LATENCIES = (0.0, 0.02)
READERS = {
    "ours": "ucformat",
    "fsspec": "ucformat's plan through s3fs",
    "zarr": "zarr-python over s3fs",
    "dcp": "PyTorch DCP, FsspecReader over s3fs",
}
PART = 8 << 20


def main() -> None:
    place = os.environ.get("UCP_BENCH_S3")
    if not place:
        folder = made(OUT)
        make_universal(folder / "universal")
    total = sum(2 * math.prod(shape) for shape in shapes().values())
    print(
        f"{total / 1e9:.2f} GB in {len(shapes())} tensors, {ROUNDS} interleaved rounds, medians:\n"
    )
    for latency in (0.0,) if place else LATENCIES:
        with _served(place, latency) as (url, environment):
            found: Found = {}
            for _ in range(ROUNDS):
                for layout in LAYOUTS:
                    for names, turns in [("ours,raw", TURNS), *((name, 1) for name in READERS)]:
                        _read(found, names, layout, url, environment, turns)
        how = "at once" if not latency else f"after {1000 * latency:.0f} ms"
        for layout in LAYOUTS:
            print(
                f"**sharding: {layout}**, responses {how}\n"
                if not place
                else f"**sharding: {layout}**, {place}\n"
            )
            _show(found, layout, latency)


@contextmanager
def _served(place: str | None, latency: float) -> Iterator[tuple[str, dict[str, str]]]:
    environment = {**os.environ, "PYTHONPATH": "."}
    if place:
        yield place, environment
        return
    with serving_files(made(OUT), latency) as served:
        yield (
            served.url("").rstrip("/"),
            {**environment, **ENVIRONMENT, "UCP_ENDPOINT": served.endpoint},
        )


def _read(
    found: Found, names: str, layout: str, url: str, environment: dict[str, str], turns: int
) -> None:
    """One process."""
    endpoint = environment.get("UCP_ENDPOINT", "")
    run([ours(), "-m", "bench.s3_readers", names, layout, endpoint, url, str(turns)], environment)
    said = json.loads((OUT / "command.log").read_text().splitlines()[-1])
    for name in names.split(","):
        key = f"{name} in turn" if "," in names else name
        found.setdefault((key, layout), []).extend(
            {**took, "peak": said["peak"]} for took in said[name]
        )


def _show(found: Found, layout: str, latency: float) -> None:
    def of(name: str, what: str) -> float:
        return median([t[what] for t in found[name, layout]])

    needed = of("ours", "needed")
    counted = "requests" in found["ours", layout][0]
    rows = []
    for name, title in READERS.items():
        asked = (
            [f"{of(name, 'requests'):.0f}", f"{of(name, 'nbytes') / needed:.3f}"]
            if counted
            else ["", ""]
        )
        seconds, peak = of(name, "seconds"), max(t["peak"] for t in found[name, layout])
        rows.append(
            [
                title,
                f"{seconds:.3f}",
                f"{seconds / of('ours', 'seconds'):.1f}",
                *asked,
                f"{peak / 1e6:.0f}",
            ]
        )
    head = [f"{needed / 1e6:.0f} MB", "seconds", "÷ ucformat", "requests", "bytes read ÷ needed"]
    print(table([*head, "peak RSS above the tensors, MB"], rows) + "\n")
    mine, raw = of("ours in turn", "execute"), of("raw in turn", "execute")
    print(
        f"The reads alone, after opening and planning: {mine:.3f} s; `get_ranges` {raw:.3f} s, which leaves the bytes"
    )
    print(
        "where they come. Ours are verified and in the tensors; a last request asks whether the manifest has changed.\n"
    )
    wanted = [
        ("speed of the reads ÷ `get_ranges`", ">= 0.9", raw / mine),
        (
            "zarr-python over s3fs ÷ ucformat, seconds",
            ">= 3",
            of("zarr", "seconds") / of("ours", "seconds"),
        ),
    ]
    if latency:
        wanted.append(("opening ÷ latency", "<= 1.5", of("ours", "open") / latency))
    if counted:
        # besides those for the data one for the manifest, and one whether it has changed
        least = least_requests(made(OUT), layout, PART) + 2
        wanted.append(
            (
                f"requests with opening; 1.2 × the least that read no other bytes, {least}",
                f"<= {1.2 * least:.0f}",
                of("ours", "requests"),
            )
        )
        wanted.append(("bytes read ÷ needed", "<= 1.05", of("ours", "nbytes") / needed))
    print(targets(*wanted) + "\n")


if __name__ == "__main__":
    main()
