"""What commands cost before their work: processor time of whole processes on a checkpoint of one tensor.

`python -m bench.startup`. All commands are interleaved with interpreters that only import the
libraries that these commands must have. The bytecode is compiled before, as pip does it.
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
OURS = 0.08  # seconds that a command may take beside what it imports of others
FOLDER = OUT / "startup"
FILE, SAVED = FOLDER / "a.safetensors", FOLDER / "run" / "1"
#: What commands must import of others: the catalog, a universal checkpoint, arrays and filters.
CATALOG = ("sqlalchemy",)
UNIVERSAL = ("xxhash", "pydantic.main")
ARRAYS = ("numpy", "ml_dtypes")
#: By command, what it must import besides click. `pydantic` itself imports its parts when they are used;
#: `pydantic.main` has what a model is, and the rest is imported when the first model is made.
COMMANDS = {
    "--help": (),
    **dict.fromkeys(
        ("ls", "alias list", "lineage {saved}", "log", "catalog info", "show {file}"), CATALOG
    ),
    "layout schema": ("pydantic.main",),
    "show {saved}": (*CATALOG, *UNIVERSAL),
    "get {saved} a": (*UNIVERSAL, *ARRAYS),
    "get {file} a": ARRAYS,
    "verify {saved}": (*CATALOG, *UNIVERSAL, *ARRAYS),
    "ls step=1": (*CATALOG, "lark"),
    **dict.fromkeys(("gc", "tag {saved} new"), (*CATALOG, *UNIVERSAL)),
    "convert {file} {saved}2 --overwrite": (*CATALOG, *UNIVERSAL, *ARRAYS),
}


def main() -> None:
    compileall.compile_dir(Path(ucformat.__file__).parent, quiet=1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.environ["UCP_CATALOG"] = str((FOLDER / "catalog.db").absolute())
    save_file({"a": np.arange(4, dtype=np.float32)}, FILE)
    ucformat.convert(FILE, SAVED)
    run = [ours(), "-m", "ucformat.cli"]
    os.environ |= {
        "OPENBLAS_NUM_THREADS": "1",
        "PYDANTIC_DISABLE_PLUGINS": "__all__",
    }  # as `ucp` does
    imports = {_import(names): [ours(), "-c", _import(names)] for names in COMMANDS.values()}
    lines = {"Python itself": [ours(), "-c", "pass"], **imports}
    named = {f"`ucp {c.format(file='F', saved='U')}`": c for c in COMMANDS}
    lines |= {
        line: [*run, *command.format(file=FILE, saved=SAVED).split()]
        for line, command in named.items()
    }
    times: dict[str, list[float]] = {line: [] for line in lines}
    for number in range(ROUNDS + 1):
        for line, command in lines.items():
            seconds = processor_time(command)
            if number:  # not the first, which reads from the disk
                times[line].append(seconds)
    rows = [[line, f"{min(taken):.3f}", f"{median(taken):.3f}"] for line, taken in times.items()]
    print(f"Processor seconds, user and system, of {ROUNDS} interleaved rounds.\n")
    print(table(["", "lowest", "median"], rows) + "\n")
    print(
        "`U` is a universal checkpoint in the catalog, `F` a file of safetensors. The target of a command "
        f"is the median of its imports and {OURS} s.\n"
    )
    bounds = {line: median(times[_import(COMMANDS[c])]) + OURS for line, c in named.items()}
    print(
        targets(
            *(
                (f"{line}, s", f"<= {bound:.3f}", median(times[line]))
                for line, bound in bounds.items()
            )
        )
    )
    shutil.rmtree(FOLDER)


def _import(names: tuple[str, ...]) -> str:
    model = "; type('Model', (pydantic.main.BaseModel,), {})" if "pydantic.main" in names else ""
    return f"import {', '.join(('click', *names))}{model}"


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
