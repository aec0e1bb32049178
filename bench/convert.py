"""Conversion of a real ZeRO-3 checkpoint of 1.1 GB: ucformat, DeepSpeed's `ds_to_universal`, and `cp -r` + `sync -f`.

`python -m bench.convert`. All on the same files and interleaved, with a catalog; `cp` and ucformat
end when everything is durable. Whole processes from start to exit, and `ucformat.convert` also
called in this process. DeepSpeed, which is slow, runs in fewer rounds, or not at all where it is
not installed.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import time
from pathlib import Path

import ucformat
from bench.common import (
    OUT,
    Run,
    engine_environment,
    median,
    ours,
    real_checkpoint,
    run,
    table,
    targets,
)
from tests.engines import engine

ROUNDS = 9
OF_DEEPSPEED = 3  # of these rounds
OLD = OUT / "old"
WORKERS = [(1, 1), (2, 2), (4, 2)]  # of extraction and of merging; the last is DeepSpeed's default


def main() -> None:
    compileall.compile_dir(Path(ucformat.__file__).parent, quiet=1)  # as pip does
    source = real_checkpoint()
    tag = source / (source / "latest").read_text()
    size = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
    target = OUT / "target"
    os.environ["UCP_CATALOG"] = str((OUT / "convert.db").absolute())
    try:
        python, environment = str(engine("deepspeed")), engine_environment()
    except RuntimeError:
        python, environment = "", {}

    def deepspeed(extract: int, merge: int) -> list[str]:
        workers = ["--num_extract_workers", str(extract), "--num_merge_workers", str(merge)]
        folders = ["--input_folder", str(tag), "--output_folder", str(target)]
        return [
            python,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            *folders,
            *workers,
            "--inject_missing_state",
        ]

    copy = ["sh", "-c", f"cp -r {source} {target} && sync -f {target}"]
    convert = [ours(), "-m", "ucformat.cli", "convert", str(source), str(target)]
    empty = [ours(), "-c", "import ucformat; ucformat.convert, ucformat.open, ucformat.Layout"]

    best = (
        min(WORKERS, key=lambda w: once(deepspeed(*w), target, environment).seconds)
        if python
        else WORKERS[0]
    )
    times: dict[str, list[Run]] = {"cp": [], "ucformat": [], "api": []}
    once(copy, target)
    once(convert, target)
    called(source, target)
    for number in range(ROUNDS):
        times["cp"].append(once(copy, target))
        times["ucformat"].append(once(convert, target))
        times["api"].append(called(source, target))
        if python and number < OF_DEEPSPEED:
            times.setdefault("deepspeed", []).append(once(deepspeed(*best), target, environment))
    clean(target)
    shutil.rmtree(OLD)
    seconds = {k: median([r.seconds for r in v]) for k, v in times.items()}
    idle = run(empty).peak
    names = {
        "cp": "`cp -r` + `sync -f`",
        "ucformat": "`ucp convert`",
        "api": "`ucformat.convert`, called in this process",
        "deepspeed": f"`ds_to_universal`, workers {best}",
    }
    rows = [
        [
            names[k],
            f"{seconds[k]:.2f} ({min(r.seconds for r in v):.2f}–{max(r.seconds for r in v):.2f})",
            f"{seconds[k] / seconds['cp']:.2f}",
            f"{seconds['deepspeed'] / seconds[k]:.1f}" if python else "",
            f"{max(r.peak for r in v) / 1e6:.0f}" if k != "api" else "",
            f"{median([r.processor for r in v]):.2f} ({median([r.kernel for r in v]):.2f})",
        ]
        for k, v in times.items()
    ]
    rounds = f"{ROUNDS} interleaved rounds" + (f", {OF_DEEPSPEED} of DeepSpeed" if python else "")
    print(f"{size / 1e9:.2f} GB, {rounds}, medians (range):\n")
    print(
        table(
            ["", "seconds", "× cp", "DeepSpeed ÷ it", "peak RSS, MB", "processor s (kernel)"], rows
        )
    )
    started = seconds["ucformat"] - seconds["api"]
    print(
        f"\nOf `ucp convert`, {started:.2f} s start the interpreter, import libraries and record the first checkpoint"
    )
    print("in the catalog (`python -m bench.startup`).")
    print(
        "`cp` and ucformat finish when all data is on disk; `ds_to_universal` does not wait for it."
    )
    print(
        f"Peak RSS of an interpreter that imports all of ucformat and does nothing: {idle / 1e6:.0f} MB.\n"
    )
    ratios = (
        [("`ds_to_universal` ÷ `ucp convert`", ">= 8", seconds["deepspeed"] / seconds["ucformat"])]
        if python
        else []
    )
    print(
        targets(
            ("`ucformat.convert`, called, × cp", "<= 1.2", seconds["api"] / seconds["cp"]),
            ("`ucp convert`, a process, × cp", "<= 1.5", seconds["ucformat"] / seconds["cp"]),
            *ratios,
            (
                "peak RSS above the interpreter's, MB",
                "<= 400",
                (max(r.peak for r in times["ucformat"]) - idle) / 1e6,
            ),
        )
    )


def called(source: Path, target: Path) -> Run:
    """One call, without the start of an interpreter."""
    clean(target)
    before, begun = os.times(), time.perf_counter()
    ucformat.convert(source, target)
    after, seconds = os.times(), time.perf_counter() - begun
    kernel = after.system - before.system
    return Run(seconds, 0, after.user - before.user + kernel, kernel)


def clean(target: Path) -> None:
    """Nothing at the target, and nothing left to write back from before.

    Files are emptied, and removed only in the end: ext4 without a journal looks at every inode that
    was removed in the last minutes whenever it makes a file, which would be charged to whoever
    writes many.
    """
    OLD.mkdir(parents=True, exist_ok=True)
    if target.exists():
        kept = target.rename(OLD / str(time.monotonic_ns()))
        for file in kept.rglob("*"):
            if file.is_file():
                os.truncate(file, 0)
    for leftover in OUT.glob("latest_universal"):
        leftover.unlink()
    subprocess.run(["sync", "-f", str(OUT)], check=True)


def once(command: list[str], target: Path, environment: dict[str, str] | None = None) -> Run:
    """One run of a process into a fresh folder."""
    clean(target)
    return run(command, environment)


if __name__ == "__main__":
    main()
