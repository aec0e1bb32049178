"""`python -m tests.fuzz`: coverage-guided fuzzing with Atheris (libFuzzer), one process for each target.

    python -m tests.fuzz                            all targets, 100,000 inputs each
    python -m tests.fuzz manifest --runs 1000000    one
    python -m tests.fuzz manifest --input FILE      what a finding does
    python -m tests.fuzz --keep                     take over new inputs that reach new code into the tree

What is found lies in `.fuzz/TARGET`; `tests/fuzz/corpus/TARGET` has what each begins with.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import pkgutil
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import click

HERE = Path(__file__).parent
FOUND = HERE.parents[1] / ".fuzz"
NAMES = tuple(sorted(p.name for p in (HERE / "corpus").iterdir()))
_KEPT, _MOST = 100_000, 60  # bytes and inputs of the corpus of a target that are kept in the tree
_LONGEST = 16_384  # bytes of an input


def main() -> int:
    """Do what the command line says; 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument(
        "--runs", type=int, default=100_000, help="inputs that each target is given"
    )
    parser.add_argument("--seconds", type=int, default=0, help="end each target after so long")
    parser.add_argument("--input", type=Path, help="give a target this input alone")
    parser.add_argument(
        "--keep", action="store_true", help="keep what reaches new code in the tree"
    )
    parser.add_argument("--out", type=Path, help="where to note what was done")
    given = parser.parse_args()
    targets = given.targets or NAMES
    if given.input is not None:
        return subprocess.run(_command(targets[0], str(given.input)), check=False).returncode
    if given.keep:
        for target in targets:
            _keep(target)
        return 0
    return (
        sum(_run(target, given.runs, given.seconds, given.out) for target in targets) > 0
    )  # each, whatever is found


def _command(target: str, *more: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; from tests.fuzz.__main__ import fuzz; fuzz(*sys.argv[1:])",
        target,
        *more,
    ]


def fuzz(target: str, *options: str) -> None:
    """Fuzz in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["ucformat"]):
        from tests.fuzz.targets import REFUSED, TARGETS

        for package in (
            "catalog",
            "format",
            "geometry",
            "jobs",
            "schema",
            "sources",
            "storage",
        ):  # else when needed
            for info in pkgutil.walk_packages(
                import_module(f"ucformat.{package}").__path__, f"ucformat.{package}."
            ):
                import_module(info.name)

    act = TARGETS[target]
    logging.disable()
    warnings.simplefilter("ignore")

    def once(data: bytes) -> None:
        with suppress(*REFUSED):
            act(data)

    atheris.Setup([f"{target}.py", *options], once)
    atheris.Fuzz()


def _run(target: str, runs: int, seconds: int, out: Path | None) -> bool:
    """Fuzz one target, and say what came of it; whether anything was found."""
    found = FOUND / target
    (found / "corpus").mkdir(parents=True, exist_ok=True)
    begun = dt.datetime.now(dt.UTC)
    done = subprocess.run(
        _command(
            *(target, str(found / "corpus"), str(HERE / "corpus" / target), f"-runs={runs}"),
            *(
                f"-max_total_time={seconds}",
                f"-max_len={_LONGEST}",
                f"-artifact_prefix={found}/",
                "-timeout=60",
            ),
            *(
                "-rss_limit_mb=3000",
                "-print_final_stats=1",
                "-verbosity=1",
                "-close_fd_mask=1",
                "-report_slow_units=60",
            ),
        ),
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode(errors="replace")
    counted = re.search(r"number_of_executed_units: (\d+)", said)
    covered = re.findall(r" cov: (\d+)", said)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    row = {
        "target": target,
        "runs": int(counted[1]) if counted else 0,
        "covered": int(covered[-1]) if covered else 0,
        "seconds": round((dt.datetime.now(dt.UTC) - begun).total_seconds()),
        "date": begun.date().isoformat(),
        "commit": commit.stdout.strip(),
        "found": re.findall(r"Test unit written to (\S+)", said),
    }
    click.echo(json.dumps(row))
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
    if done.returncode:
        click.echo(said[-4000:], err=True)
        click.echo(f"look at it with: python -m tests.fuzz {target} --input FILE", err=True)
    return done.returncode != 0


def _keep(target: str) -> None:
    """Make the corpus of the tree anew: the smallest inputs that together reach all that is reached."""
    kept = HERE / "corpus" / target
    with tempfile.TemporaryDirectory() as merged:
        new = FOUND / target / "corpus"
        new.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            _command(target, "-merge=1", merged, str(kept), str(new)),
            check=True,
            capture_output=True,
        )
        files = sorted(Path(merged).iterdir(), key=lambda p: (p.stat().st_size, p.name))
        room = _KEPT
        chosen: list[tuple[str, bytes]] = []
        for file in files:
            room -= file.stat().st_size
            if room >= 0 and len(chosen) < _MOST:
                chosen.append((file.name, file.read_bytes()))
    for name, data in chosen:
        (kept / name).write_bytes(data)
    click.echo(
        f"{target}: {len(chosen)} of {len(files)} inputs, {sum(len(d) for _, d in chosen):,} bytes"
    )


if __name__ == "__main__":
    sys.exit(main())
