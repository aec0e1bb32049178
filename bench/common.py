"""What the benchmarks share: the files they work on, timing of processes, tables."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.engines import engine, torchrun

os.environ["UCP_CATALOG"] = "none"  # bench/catalog.py measures recording

OUT = Path("bench/out")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Run:
    """One finished process: wall-clock seconds, the most memory that it and its children held, in bytes.

    Also its processor seconds, and the part of them that the kernel took.
    """

    seconds: float
    peak: int
    processor: float
    kernel: float


def real_checkpoint() -> Path:
    """A ZeRO-3 checkpoint of 1.1 GB that DeepSpeed wrote on two ranks; made once."""
    folder = OUT / "zero3"
    if not (folder / "latest").exists():
        OUT.mkdir(parents=True, exist_ok=True)
        script = ["bench/make_checkpoint.py", str(folder), "1024", "2816", "6", "8192"]
        torchrun(2, script, OUT / "make.log")
    return folder


def engine_environment() -> dict[str, str]:
    """The environment in which DeepSpeed's own tools run on CPU."""
    python = engine("deepspeed")
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        **os.environ,
        "PATH": path,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def run(command: list[str], environment: dict[str, str] | None = None) -> Run:
    """Run a process to its end; SystemExit where it fails."""
    begun = time.perf_counter()
    log = OUT / "command.log"
    pid = os.posix_spawnp(
        command[0],
        command,
        environment or dict(os.environ),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    peak = _Peak(pid)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - begun
    most = peak.stop()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    processor = usage.ru_utime + usage.ru_stime
    return Run(seconds, most, processor, usage.ru_stime)  # not ru_maxrss, which begins with our own


class _Peak:
    """Watches the memory of a process and all its children, summed, every 10 ms."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._over = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """The most that was seen, in bytes."""
        self._over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self._peak = max(self._peak, sum(map(_resident, _family(self._pid))))


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in _family(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |"
        for r in [head, *rows]
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def targets(*rows: tuple[str, str, float]) -> str:
    """A Markdown table of targets, and whether each is met.

    Args:
        rows: the measure, its target (`>= 0.7` or `<= 1.5`), and the measured value.
    """
    out = []
    for what, asked, measured in rows:
        sign, bound = asked.split()
        holds = measured >= float(bound) if sign == ">=" else measured <= float(bound)
        out.append(
            [
                what,
                f"{'≥' if sign == '>=' else '≤'} {bound}",
                f"{measured:.3g}",
                "yes" if holds else "**missed**",
            ]
        )
    return table(["measure", "target", "measured", "met"], out)


def ours() -> str:
    """The interpreter that has ucformat."""
    return sys.executable
