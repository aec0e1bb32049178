"""Every benchmark, or those named; writes `bench/RESULTS.md`, keeping what is not run anew. Run by `make bench`."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

BENCHMARKS = {
    "open": "Opening in place, and one row",
    "convert": "Conversion",
    "memory": "Memory of a conversion",
    "read": "Reading",
    "metadata": "Metadata of 100,000 shards",
    "scale": "100,000 extents in 1,000 files",
    "s3": "From S3",
    "train": "In the training loop",
    "catalog": "Catalog",
    "paper": "The paper's sources and targets",
}


RESULTS = Path("bench/RESULTS.md")


def main() -> None:
    parts = before()
    for name in sys.argv[1:] or list(BENCHMARKS):
        done = subprocess.run([sys.executable, "-m", f"bench.{name}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        print(done.stdout, flush=True)
        parts[BENCHMARKS[name]] = f"`python -m bench.{name}`\n\n{done.stdout.strip()}"
        written = [f"## {title}\n\n{parts[title]}\n" for title in BENCHMARKS.values() if title in parts]
        RESULTS.write_text(header() + "\n" + "\n".join(written))


def before() -> dict[str, str]:
    """What the page says now, by title."""
    _, *sections = RESULTS.read_text().split("\n## ") if RESULTS.exists() else [""]
    return {title: text.strip() for title, _, text in (s.partition("\n") for s in sections)}


def header() -> str:
    """What they ran on."""
    packages = ", ".join(
        f"{p} {version(p)}" for p in ("numpy", "tensorstore", "safetensors", "crc32c", "xxhash", "sqlalchemy")
    )
    cpu = next(s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        "# Results\n\n"
        "Ratios measured in one run on the same files, runs interleaved; `make bench` makes the files and "
        "writes this page.\n"
        "Absolute numbers are those of one shared virtual machine and mean little.\n\n"
        f"{dt.datetime.now(dt.UTC).date()}; {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB; {platform.system()} "
        f"{platform.release()}; Python {platform.python_version()}; {packages}; peers: "
        "torch 2.13.0, DeepSpeed 0.19.8, MLflow 3.17.2.\n"
    )


if __name__ == "__main__":
    main()
