"""What commands cost before their work: processor time of whole processes on a checkpoint of one tensor.

`python -m bench.startup`. All commands are interleaved with an interpreter that only imports the
libraries that they need. The bytecode is compiled before, as pip does it.
"""

from __future__ import annotations

import compileall
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import ucformat
from bench.common import OUT, median, ours, table, targets

ROUNDS = 15
GOAL = 0.25  # seconds
FOLDER = OUT / "startup"
FILE, SAVED = FOLDER / "a.safetensors", FOLDER / "run" / "1"
COMMANDS = [
    *("--help", "ls", "alias list", "lineage {saved}", "log", "catalog info", "layout schema"),
    *(
        "show {saved}",
        "show {file}",
        "get {saved} a",
        "get {file} a",
        "verify {saved}",
        "ls step=1",
        "gc",
    ),
    *("tag {saved} new", "convert {file} {saved}2 --overwrite"),
]
LIBRARIES = ["click", "sqlalchemy", "pydantic", "numpy"]


def main() -> None:
    compileall.compile_dir(Path(ucformat.__file__).parent, quiet=1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.environ["UCP_CATALOG"] = str((FOLDER / "catalog.db").absolute())
    save_file({"a": np.arange(4, dtype=np.float32)}, FILE)
    ucformat.convert(FILE, SAVED)
    run = [ours(), "-m", "ucformat.cli"]
    imports = {f"`import {name}`": [ours(), "-c", f"import {name}"] for name in LIBRARIES}
    lines = {"Python itself": [ours(), "-c", "pass"], **imports}
    lines |= {
        f"`ucp {c.format(file='F', saved='U')}`": [*run, *c.format(file=FILE, saved=SAVED).split()]
        for c in COMMANDS
    }
    times: dict[str, list[float]] = {line: [] for line in lines}
    for number in range(ROUNDS + 1):
        for line, command in lines.items():
            seconds = processor_time(command)
            if number:  # not the first, which reads from the disk
                times[line].append(seconds)
    rows = [[line, f"{min(found):.2f}", f"{median(found):.2f}"] for line, found in times.items()]
    print(f"Processor seconds, user and system, of {ROUNDS} interleaved rounds.\n")
    print(table(["", "lowest", "median"], rows) + "\n")
    catalog = median(times["`ucp ls`"]) - median(times["`import sqlalchemy`"])
    print(
        "`U` is a universal checkpoint, `F` a file of safetensors. Commands that use the catalog import SQLAlchemy; of"
    )
    print(f"`ucp ls`, {catalog * 1000:.0f} ms are ours.\n")
    print(
        targets(
            *(
                (f"{line}, s", f"<= {GOAL}", median(times[line]))
                for line in lines
                if line.startswith("`ucp")
            )
        )
    )
    shutil.rmtree(FOLDER)


def processor_time(command: list[str]) -> float:
    """Run a process to its end; returns its seconds of processor time."""
    silent = [
        (os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)
    ]
    _, status, usage = os.wait4(
        os.posix_spawn(command[0], command, os.environ, file_actions=silent), 0
    )
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
