"""Registering trees of steps for the first time, again, and again in full; and one that very many others need.

`python -m bench.register [--steps N] [--dependents N] [--without-postgres]`. By default 1,000 tiny
steps of DeepSpeed's of two ranks and 27 tensors, then as many of which half are universal ones;
each `ucp register -r` is a process. Then a catalog with one checkpoint, and 100,000 virtual ones
that need it. PostgreSQL, on the same machine, syncs every commit.

`python -m bench.register --large N` registers so many steps of DeepSpeed's in one process, and in
two at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import sqlalchemy as sa

import ucformat
from bench.catalog import sync
from bench.catalog_fill import Plan, made, manifest, own_row
from bench.common import OUT, ours, run, table, targets
from tests.catalog.databases import running_postgres
from tests.zero_files import FLAT, write_zero3
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.models import CheckpointRow, Edge, Location
from ucformat.catalog.retention import load_policy
from ucformat.errors import PermissionDenied, UnsupportedError
from ucformat.format.structure import manifest_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ASKED = {"first": 60, "again": 3}  # processor seconds for 10,000 steps of DeepSpeed's
BASE = "/checkpoints/run00/step0"


def make_deepspeed(folder: Path, steps: int) -> None:
    """So many steps of ten runs, each of a model with 27 parameters in three states, and with its own content."""
    names = [f"model.layers.{i // 9}.part{i % 9}.weight" for i in range(27)]
    for step in range(steps):
        arrays = {(n, s): np.full((4, 6), step, np.float32) for n in names for s in FLAT}
        write_zero3(folder / f"run{step % 10}", arrays, 2, step)


def make_both(folder: Path, steps: int) -> None:
    """So many steps, half of them DeepSpeed's and half copies of a universal one, each with its own content or id."""
    arrays = {(n, s): np.arange(24, dtype=np.float32).reshape(4, 6) for n in "ab" for s in FLAT}
    first = folder / "first" / "step-0"
    for step in range(steps // 2):
        write_zero3(folder / "deepspeed", arrays, 2, step)
    first_manifest = ucformat.convert(folder / "deepspeed" / "global_step0", first).manifest
    for step in range(1, steps - steps // 2):
        place = shutil.copytree(first, folder / "universal" / f"step-{step}")
        another = first_manifest.model_copy(update={"id": uuid.uuid4().hex, "step": step})
        (place / "manifest.json").write_bytes(manifest_bytes(another))


def registering(folder: Path, steps: int, what: str) -> dict[str, float]:
    """Print what each pass cost; processor seconds of each, for 10,000 steps."""
    time.sleep(0.2)  # files that were changed a moment ago are not passed over
    command = [
        ours(),
        "-m",
        "ucformat.cli",
        "register",
        "-r",
        str(folder),
        "-q",
        "--catalog",
        f"sqlite:///{folder}.db",
    ]
    rows, found = [], {}
    for name, more in (("first", []), ("again", []), ("again, with `--rescan`", ["--rescan"])):
        done = run([*command, *more])
        if (number := len((OUT / "command.log").read_text().split())) != steps:
            raise SystemExit(f"{number} of {steps} were registered")
        found[name] = done.processor / steps * 1e4
        rows.append(
            [
                name,
                *(f"{n:.1f}" for n in (done.processor, done.seconds, found[name])),
                f"{done.peak >> 20}",
            ]
        )
    head = [
        f"{steps:,} {what}",
        "processor seconds",
        "seconds",
        "processor seconds for 10,000",
        "MiB",
    ]
    print(table(head, rows))
    return found


def large(folder: Path, steps: int) -> None:
    """Print what one process takes for a tree, and again, and two that register a part each."""
    make_deepspeed(folder / "deepspeed", steps)
    time.sleep(0.2)
    rows = []
    for name, catalog, parts in (
        ("first", "one", 1),
        ("again", "one", 1),
        ("in two processes", "two", 2),
    ):
        command = [ours(), "-m", "ucformat.cli", "register", "-r", str(folder / "deepspeed"), "-q"]
        command += ["--catalog", f"sqlite:///{folder}/{catalog}.db"]
        begun = time.perf_counter()
        with ThreadPoolExecutor(parts) as pool:
            each = [
                [*command, *(["--part", f"{part}/{parts}"] if parts > 1 else [])]
                for part in range(parts)
            ]
            done = list(pool.map(run, each))
        seconds, processor = time.perf_counter() - begun, sum(one.processor for one in done)
        with Catalog(f"sqlite:///{folder}/{catalog}.db") as opened, opened.database.reading() as c:
            if (number := c.scalar(sa.select(sa.func.count()).select_from(CheckpointRow))) != steps:
                raise SystemExit(f"{number} of {steps} were registered")
        peak = f"{max(one.peak for one in done) >> 20}"
        rows.append(
            [name, f"{processor:.1f}", f"{seconds:.1f}", f"{processor / steps * 1e3:.2f}", peak]
        )
        print(f"{name}: load average {os.getloadavg()[0]:.1f}", flush=True)
    print(
        table(
            [f"{steps:,} steps", "processor seconds", "seconds", "processor ms for each", "MiB"],
            rows,
        )
    )


def needing(urls: Mapping[str, str], dependents: int) -> dict[str, float]:
    """Print how long it takes to judge and refuse; of each engine, seconds to refuse a deletion."""
    policy = load_policy({"version": 1, "keep": {"last": 1}})
    seconds: dict[str, list[float]] = {}
    for url in urls.values():
        with Catalog(url) as catalog:
            base = make_dependents(catalog, dependents)
            asked: tuple[tuple[str, Callable[[], Any]], ...] = (
                ("a refused deletion", lambda c=catalog, b=base: refused(c, b)),  # type: ignore[misc]
                ("plan of a retention policy", lambda c=catalog: c.retain(policy)),  # type: ignore[misc]
                ("plan of `gc`", catalog.purgeable),
            )
            for what, ask in asked:
                begun = time.perf_counter()
                ask()
                seconds.setdefault(what, []).append(time.perf_counter() - begun)
    rows = [[what, *(f"{s:.2f}" for s in each)] for what, each in seconds.items()]
    print(table([f"seconds, {dependents:,} dependents", *urls], rows))
    return dict(zip(urls, seconds["a refused deletion"], strict=True))


def make_dependents(catalog: Catalog, dependents: int) -> str:
    """Record one checkpoint, and insert copies of its row that need it; its id."""
    base = catalog.record(manifest(next(made(Plan(1, 4))), 4, 0), BASE)
    with catalog.database.writing() as c:
        row = own_row(c.execute(sa.select(CheckpointRow.__table__)).mappings().one())
        serials = range(row["serial"] + 1, row["serial"] + 1 + dependents)
        copies = [row | {"serial": s, "id": uuid.uuid4().hex, "step": s} for s in serials]
        c.execute(sa.insert(CheckpointRow), copies)
        places = [{"checkpoint": s, "url": f"/views/{s}", "seen": row["created"]} for s in serials]
        c.execute(sa.insert(Location), places)
        edge = {
            "parent": row["serial"],
            "parent_id": None,
            "parent_url": BASE,
            "kind": "convert",
            "depends": True,
        }
        c.execute(sa.insert(Edge), [edge | {"child": s} for s in serials])
        c.execute(sa.text("analyze"))
    return base.id


def refused(catalog: Catalog, checkpoint: str) -> None:
    """Try to delete it."""
    try:
        catalog.delete(checkpoint)
    except (PermissionDenied, UnsupportedError):
        return
    raise SystemExit("what others need was deleted")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dependents", type=int, default=100_000)
    parser.add_argument("--without-postgres", action="store_true")
    parser.add_argument("--large", type=int)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ucp-bench-")))
        OUT.mkdir(parents=True, exist_ok=True)
        if given.large:
            large(folder, given.large)
            return
        make_deepspeed(folder / "deepspeed", given.steps)
        spent = registering(folder / "deepspeed", given.steps, "steps of DeepSpeed's")
        make_both(folder / "both", given.steps)
        print()
        registering(folder / "both", given.steps, "steps, half of them universal")
        print(f"\nLoad average: {os.getloadavg()[0]:.1f}.\n")
        urls = {"SQLite": f"sqlite:///{folder}/needed.db"}
        if not given.without_postgres:
            server = stack.enter_context(running_postgres())
            urls["PostgreSQL"] = server.fresh()
            sync(server.url)
        refusals = needing(urls, given.dependents)
        what = f"seconds to refuse deleting a checkpoint with {given.dependents:,} dependents"
        print()
        print(
            targets(
                *(
                    (f"processor seconds for 10,000 steps, {n}", f"<= {most}", spent[n])
                    for n, most in ASKED.items()
                ),
                *((f"{what}, {name}", "<= 1", seconds) for name, seconds in refusals.items()),
            )
        )


if __name__ == "__main__":
    main()
