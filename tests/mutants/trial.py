"""Copies of the checkout, in which changes are tried."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from tests.mutants.sites import changed, marked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.mutants.sites import Site

#: What is changed -> the folders of tests that should notice, in the order in which they are run.
PACKAGES: dict[str, tuple[str, ...]] = {
    "geometry": ("geometry", "reading", "views", "sources", "engines", "torch"),
    "format": ("format", "conformance", "golden", "reading", "jobs", "torch"),
    "reading": ("reading", "sources", "engines", "jobs", "torch"),
    "storage": ("storage", "jobs"),
    "sources": ("sources", "engines", "exporters", "jobs", "torch"),
    "engines": ("engines", "sources", "exporters", "jobs", "torch"),
    "exporters": ("exporters", "engines", "jobs", "cli"),
    "torch/saving": ("torch",),
    "torch/loading": ("torch",),
    "torch/state": ("torch",),
    "torch/comm": ("torch",),
    "torch/manager": ("torch",),
    "runs": ("runs", "cli"),
    "catalog/retention": ("catalog", "jobs", "cli"),
    "catalog/deletion": ("catalog", "jobs", "cli"),
    "catalog/filter": ("catalog", "cli"),
    "jobs": ("jobs", "exporters", "engines", "catalog", "cli"),
}
#: Records the test that reaches a place, once in each process; its first line is the path of the
#: record.
_REACHED = """
import os
_seen = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "?").rpartition(" (")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(RECORD, "a") as file:
            file.write(f"{number}\\t{test}\\n")
"""
_FEW = (
    40  # tests that are tried first, since most changes are noticed by any test that reaches them
)


@dataclass
class Reached:
    """The tests that reach a place, by the folder that holds them; the faster come first."""

    tests: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Verdict:
    """What the tests made of one change."""

    verdict: str  # killed, survived, unreached
    seconds: float
    by: str = ""  # the first test that failed, or "timeout"


class Copy:
    """A copy of a checkout: the files that git tracks, or would."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        )
        compiled = [str(p.relative_to(root)) for p in root.glob("ucformat/*.so")]
        for name in [*filter(None, listed.stdout.split("\0")), *compiled]:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (root / name).is_symlink() or (root / name).is_file():
                shutil.copy2(root / name, target, follow_symlinks=False)
        if (root / ".engines").is_dir():
            (folder / ".engines").symlink_to((root / ".engines").resolve())
        self._time = int(time.time())

    def write(self, name: str, text: str) -> None:
        """Replace a file; its time moves on, so that nothing compiled before is taken for it."""
        self._time += 2
        (self.folder / name).write_text(text)
        os.utime(self.folder / name, (self._time, self._time))

    def pytest(self, arguments: Sequence[str], timeout: float | None) -> tuple[int | None, str]:
        """The exit code, None after `timeout` seconds, and what was printed."""
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("UCFORMAT_TEST_SERVERS", "PYTEST_CURRENT_TEST")
        }
        environment |= {"PYTHONPATH": str(self.folder)}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not matrix",
            "--tb=no",
            "-rfE",
            *arguments,
        ]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=-1,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output.decode(errors="replace")

    def verdict(self, site: Site, reached: Reached, patience: float) -> Verdict:
        """Make one change, run the tests that reach it until one fails, and take the change back.

        What no test has noticed after `patience` seconds of running whole files has survived.
        """
        begun = time.monotonic()
        source = (self.folder / site.file).read_text()
        self.write(site.file, changed(source, site.index))
        try:
            stages = [(tests, False) for tests in _few(reached)] + [
                (files, True) for files in _files(reached)
            ]
            for tests, whole in stages:
                code, output = self.pytest(
                    ["-x", *tests], patience if whole else 300 + 10 * reached.seconds
                )
                if code is None and whole:
                    break
                if code != 0:
                    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                    by = "timeout" if code is None else failed[1] if failed else f"exit code {code}"
                    return Verdict("killed", time.monotonic() - begun, by)
        finally:
            self.write(site.file, source)
        return Verdict("survived" if reached.tests else "unreached", time.monotonic() - begun)


@contextmanager
def copies(root: Path, number: int) -> Iterator[queue.Queue[Copy]]:
    """Copies of a checkout; whoever takes one puts it back."""
    shared = Path("/dev/shm")  # noqa: S108 - memory: nothing here is to last
    with TemporaryDirectory(prefix="mutants-", dir=shared if shared.is_dir() else None) as folder:
        made: queue.Queue[Copy] = queue.Queue()
        for n in range(number):
            made.put(Copy(root, Path(folder) / str(n)))
        yield made


def reach(
    copy: Copy, picked: Sequence[Site], workers: int
) -> tuple[dict[Site, Reached], list[str]]:
    """Run the folders' tests once with all places marked.

    Returns:
        the tests that reach each place, and the tests that failed without any change, which then
        notice nothing
    """
    record = copy.folder / "reached.txt"
    record.touch()
    copy.write("ucformat/_reached.py", f"RECORD = {str(record)!r}\n{_REACHED}")
    sources = {name: (copy.folder / name).read_text() for name in {s.file for s in picked}}
    for name, source in sources.items():
        numbers = {s.index: n for n, s in enumerate(picked) if s.file == name}
        copy.write(name, marked(source, numbers))
    folders = dict.fromkeys(
        f"tests/{f}" for s in picked for f in _folders(s) if (copy.folder / "tests" / f).is_dir()
    )
    report = copy.folder / "report.xml"
    copy.pytest(
        [*folders, f"--junitxml={report}", "-n", str(workers), "--dist", "worksteal"], timeout=None
    )
    for name, source in sources.items():
        copy.write(name, source)
    seconds, failed = _outcomes(report, copy.folder)
    reached = {site: Reached() for site in picked}
    lines = sorted(
        set(record.read_text().splitlines()), key=lambda line: seconds[line.partition("\t")[2]]
    )
    for number, _, test in (line.partition("\t") for line in lines):
        site = picked[int(number)]
        folder = next((f for f in _folders(site) if test.startswith(f"tests/{f}/")), None)
        if folder and test not in failed:
            reached[site].tests.setdefault(folder, []).append(test)
    per_file: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        per_file[_file(test)] += taken
    for place in reached.values():
        place.seconds = sum(
            per_file[f] for f in {_file(t) for tests in place.tests.values() for t in tests}
        )
    return reached, sorted(failed)


def _folders(site: Site) -> tuple[str, ...]:
    return next(
        folders for name, folders in PACKAGES.items() if site.file.startswith(f"ucformat/{name}")
    )


def _file(test: str) -> str:
    return test.partition("::")[0]


def _few(reached: Reached) -> Iterator[list[str]]:
    """Some fast tests of each folder."""
    for tests in reached.tests.values():
        by_function = {test.partition("[")[0]: test for test in reversed(tests)}
        yield list(reversed(by_function.values()))[:_FEW]


def _files(reached: Reached) -> Iterator[list[str]]:
    """The whole files of each folder: what a fixture did for one test is often seen by another."""
    for tests in reached.tests.values():
        yield list(dict.fromkeys(map(_file, tests)))


def _outcomes(report: Path, root: Path) -> tuple[dict[str, float], set[str]]:
    """Seconds of each test, and the tests that failed."""
    seconds: dict[str, float] = defaultdict(float)
    failed: set[str] = set()
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        parts = case.get("classname", "").split(".")
        depth = next(
            n
            for n in range(len(parts), 0, -1)
            if (root / Path(*parts[:n])).with_suffix(".py").is_file()
        )
        name = "::".join(["/".join(parts[:depth]) + ".py", *parts[depth:], case.get("name", "")])
        seconds[name] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    return seconds, failed
