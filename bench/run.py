"""Every benchmark, or those named; writes `bench/RESULTS.md`. Run by `make bench`.

Each section bears its own date, machine and commit, and is replaced only when it is run anew: its
figures come from one run on one machine, and are compared with each other alone.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bench.common import ROOT

#: By the command after `python -m bench.`
BENCHMARKS = {
    "startup": "Start of commands",
    "open": "Opening in place, and one row",
    "convert": "Conversion",
    "combine": "Combining",
    "memory": "Memory of a conversion",
    "export": "Export",
    "read": "Reading",
    "compressed_arrays": "Compressed arrays",
    "fingerprints": "Fingerprints",
    "certify": "Certificates",
    "increments": "Increments",
    "partial": "Partial saves",
    "deltas": "Deltas of each step",
    "tiers": "Recovery from tiers",
    "codecs": "Codecs and patches",
    "publish": "Publishing weights",
    "small": "Many small tensors",
    "sub_models": "Sub-models",
    "zarr_store": "The Zarr store of a ZeRO-3 checkpoint",
    "metadata": "Metadata of 100,000 shards",
    "scale": "100,000 extents in 1,000 files",
    "grids": "Chunk grids",
    "s3": "From S3",
    "s3_uploads": "To S3",
    "cache": "The host cache",
    "train": "In the training loop",
    "load_into": "Filling a module for inference",
    "devices": "Devices",
    "serve": "Serving",
    "pages": "Pages of large catalogs",
    "in_place": "Weights as safetensors files",
    "ranks": "Plans of many ranks",
    "large": "A state of 8 GB",
    "catalog": "Catalog",
    "register": "Registering a tree again",
    "jobs": "Jobs over several processes",
    "paper": "The paper's sources and targets",
    "engines --model dense --resume": "Every engine under every other",
    "engines --model moe --resume": "Experts: every engine under every other",
}


RESULTS = ROOT / "bench" / "RESULTS.md"
_HEAD = (
    "# Results\n\n"
    "Each ratio compares interleaved runs on the same files. `python -m bench.run` creates the files and writes this "
    "page;\n`python -m bench.run read train` updates only these sections. Absolute numbers come from shared virtual "
    "machines, not all from the same one; compare only the ratios of one section.\n"
)


def main() -> None:
    machine, sections = machine_of_today(), before()
    for name in sys.argv[1:] or list(BENCHMARKS):
        made = f"{dt.datetime.now(dt.UTC).date()}, commit {commit()}; {software()}"
        command = [sys.executable, "-m", *f"bench.{name}".split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        print(done.stdout, flush=True)
        sections[BENCHMARKS[name]] = (
            f"`python -m bench.{name}`\n\n{made}\n\n{machine}\n\n{done.stdout.strip()}"
        )
        written = [
            f"## {title}\n\n{sections[title]}\n"
            for title in BENCHMARKS.values()
            if title in sections
        ]
        RESULTS.write_text(_HEAD + "\n" + "\n".join(written))


def before() -> dict[str, str]:
    """What the page has now, by title."""
    _, *sections = RESULTS.read_text().split("\n## ") if RESULTS.exists() else [""]
    return {title: text.strip() for title, _, text in (s.partition("\n") for s in sections)}


def machine_of_today() -> str:
    """The machine that this runs on."""
    cpu = next(
        s.split(":")[1].strip()
        for s in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in s
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB; {platform.system()} {platform.release()}"
    )


def software() -> str:
    """The versions of what is measured and of its peers."""
    names = ("numpy", "tensorstore", "safetensors", "crc32c", "xxhash", "sqlalchemy")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    return f"Python {platform.python_version()}; {packages}; peers: torch 2.13.0, DeepSpeed 0.19.8, MLflow 3.17.2"


def commit() -> str:
    """What is checked out, with a note where files differ from it; the page itself is not looked at."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")


if __name__ == "__main__":
    main()
