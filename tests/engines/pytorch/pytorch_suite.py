"""Run PyTorch's own tests of `torch.distributed.checkpoint` with `Writer` and `Reader` in place of its storage.

    pip install expecttest zstandard python -m tests.engines.pytorch.pytorch_suite
    PYTORCH/test/distributed/checkpoint --torch 2.13.0 --stock --out stock.txt python -m
    tests.engines.pytorch.pytorch_suite PYTORCH/test/distributed/checkpoint --torch 2.13.0 --only stock.txt

The tests are those of a PyTorch checkout of the version that is installed, run as they are:
`FileSystemWriter` is `ucformat.torch.Writer`, `FileSystemReader` is `ucformat.torch.Reader`, and
nothing else of storage is changed. Without a GPU tests that ask for several run on the CPU in
forked processes: `.cuda()` does nothing, and CUDA devices are the CPU. Each file runs in a process
of its own, and is ended after `--timeout` seconds. `--stock` keeps PyTorch's storage: what passes
there, which `--out` notes, is what a drop-in has to pass (`--only`). At the end, how many passed is
said for each file. Files that a PyTorch lacks are left out. docs/guides/dcp.md quotes the result.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FILES = (
    "test_async_process_executor",
    "test_compatibility",
    "test_dedup_tensors",
    "test_dtensor_checkpoint",
    "test_dtensor_resharding",
    "test_file_system_checkpoint",
    "test_file_system_checkpoint_cpu",
    "test_format_utils",
    "test_fsdp_model_state",
    "test_fsdp_optim_state",
    "test_fsdp_tp_checkpoint_conversion",
    "test_hf_storage",
    "test_hsdp_checkpoint",
    "test_planner",
    "test_save_load_api",
    "test_state_dict",
    "test_tp_checkpoint",
    "e2e/test_e2e_save_and_load",
    "e2e/test_fine_tuning",
)
STOCK = "UCFORMAT_PYTORCH_SUITE_STOCK"  #: an environment variable, so that the processes that tests start know it too
CPU_DEVICES = 4  #: how many devices a test is told of where there is no GPU


def use_ours() -> None:
    """Put our classes where PyTorch names its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem

    from ucformat.torch import Reader, Writer

    for module in (dcp, filesystem, _storage_utils):
        for name, ours in {"FileSystemWriter": Writer, "FileSystemReader": Reader}.items():
            setattr(module, name, ours)


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where a test asks for a CUDA device."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), int) or str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def do_without_gpus() -> None:
    """Let tests that ask for GPUs run on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def as_it_is(_: int, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = as_it_is
    init, start = FullyShardedDataParallel.__init__, torch.distributed.init_process_group
    init_pg = common_dtensor.DTensorTestBase.init_pg

    def on_cpu(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(
            self, *args, **{"device_id": torch.device("cpu")} | kwargs
        )  # which it would otherwise refuse

    def with_each_device_once(backend: str, **kwargs: Any) -> None:
        start(",".join(dict.fromkeys(backend.split(","))), **kwargs)  # not "cpu:gloo,cpu:gloo"

    def with_gloo(self: Any, eager_init: bool, backend: str | None = None) -> None:
        backend = backend or self.backend
        init_pg(self, eager_init, "gloo" if backend == "cpu:gloo,cuda:nccl" else backend)

    def fork(self: Any) -> None:
        if (
            torch.distributed.is_initialized()
        ):  # by a test before, in this process, which would fork it too
            torch.distributed.destroy_process_group()
        torch.multiprocessing.set_start_method("spawn", force=True)
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    FullyShardedDataParallel.__init__ = on_cpu
    torch.distributed.init_process_group = with_each_device_once
    common_dtensor.DTensorTestBase.init_pg = with_gloo
    common_distributed.MultiProcessTestCase._spawn_processes = (
        fork  # no rank imports torch anew: many times faster
    )
    torch.accelerator.device_count = torch.cuda.device_count = lambda: CPU_DEVICES
    torch.accelerator.current_device_index = lambda: "cpu"  # of which a `torch.device` is made
    torch.nn.Module.cuda = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_: self
    _OnCpu().__enter__()  # until the process ends, and in those that it forks


class _Told(unittest.TextTestResult):
    """Notes how each test ended, at once: a file that runs out of time keeps what it had."""

    out: Path

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        name = test.id().removeprefix("__main__.")
        bad = {id(t): text for t, text in (*self.errors, *self.failures)}
        skipped = {id(t): why for t, why in self.skipped}
        if id(test) in bad:
            told = "failed\t" + _reason(bad[id(test)])
        else:
            told = "skipped\t" + skipped[id(test)] if id(test) in skipped else "passed\t"
        with self.out.open("a") as file:
            file.write(f"{name}\t{told}\n")
        super().stopTest(test)


def _reason(trace: str) -> str:
    """What a traceback says in one line: its last error."""
    lines = [
        line.strip()
        for line in trace.partition("To execute this test")[0].splitlines()
        if line.strip()
    ]
    errors = [
        line
        for line in lines
        if line.partition(":")[0].endswith(("Error", "Exception", "Mismatch", "Denied"))
    ]
    return (errors or lines or ["?"])[-1][:300]


def run_file(file: Path, told: Path, pattern: str | None) -> None:
    """Run one file's tests in this process; `told` gets a line for each."""
    sys.path[:0] = [str(file.parent), str(file.parent.parent)]
    importlib.import_module(file.stem)
    _Told.out = told
    runner = unittest.TextTestRunner(resultclass=cast("Any", _Told), verbosity=2)
    unittest.main(
        module=file.stem, argv=[str(file), *(["-k", pattern] if pattern else [])], testRunner=runner
    )


def run_apart(
    file: Path, log: Path, pattern: str | None, timeout: float
) -> dict[str, tuple[str, str]]:
    """How each test of a file ended, by name, and why; run in a process of its own."""
    told = log.with_suffix(".txt")
    told.write_text("")
    command = [
        sys.executable,
        "-m",
        "tests.engines.pytorch.pytorch_suite",
        str(file),
        "--told",
        str(told),
    ]
    command += ["-k", pattern] if pattern else []
    ended = ""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = f"not done after {timeout:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # its own process group: the ranks that it started, too
            process.wait()
    results = {}
    for line in told.read_text().splitlines():
        name, status, why = line.split("\t", 2)
        results[name] = (status, why)
    if ended or not results:
        results[f"{file.stem} as a whole"] = ("failed", ended or f"ran nothing: see {log}")
    return results


def check_version(folder: Path, named: str | None) -> None:
    """SystemExit where the tests are not those of the PyTorch that is installed."""
    installed = torch.__version__.partition("+")[0]
    if named is None:
        marks = [p / "version.txt" for p in folder.parents]
        found = next((m.read_text().strip() for m in marks if m.exists()), None)
        if found is None:
            sys.exit("error: say of which PyTorch these tests are: --torch VERSION")
        named = found.partition("a0")[0]
    if named != installed:
        sys.exit(f"error: the tests are of PyTorch {named}, installed is {installed}")


def wanted(
    results: dict[str, tuple[str, str]], only: Iterable[str] | None
) -> dict[str, tuple[str, str]]:
    """The results that count; what should have run and did not has failed."""
    if only is None:
        return results
    return {name: results.get(name, ("failed", "did not run")) for name in only}


def by_file(counted: dict[str, tuple[str, str]]) -> list[str]:
    """How many of the tests of each file passed."""
    files: dict[str, list[bool]] = {}
    for name, (status, _) in counted.items():
        if status != "skipped":
            files.setdefault(name.partition(".")[0].partition(" ")[0], []).append(
                status == "passed"
            )
    return [f"{file}: {sum(passed)} of {len(passed)}" for file, passed in files.items()]


def main(argv: Sequence[str]) -> int:
    """Run the files that are asked for, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="+",
        help="test/distributed/checkpoint of a PyTorch checkout, or files there",
    )
    parser.add_argument(
        "--torch", help="the PyTorch that the tests are of (default: the checkout's version.txt)"
    )
    parser.add_argument("--stock", action="store_true", help="run over PyTorch's own storage")
    parser.add_argument(
        "--out", type=Path, help="write the names of the tests that passed to this file"
    )
    parser.add_argument(
        "--only", type=Path, help="count the tests that are named in this file only"
    )
    parser.add_argument("--logs", type=Path, help="keep the output of each file in this folder")
    parser.add_argument(
        "--timeout", type=float, default=1200, help="seconds for each file (default: 1200)"
    )
    parser.add_argument("-k", dest="pattern", help="run tests whose names contain this only")
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    places = [place.resolve() for place in options.folder]
    if options.told:
        run_file(places[0], options.told, options.pattern)
        return 0
    for place in places:
        check_version(place, options.torch)
    os.environ |= {STOCK: "1" if options.stock else "", "UCP_CATALOG": "none"}
    logs = options.logs or Path(tempfile.mkdtemp(prefix="pytorch-suite-"))
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, tuple[str, str]] = {}
    for file in chain.from_iterable(
        [p] if p.is_file() else [p / f"{name}.py" for name in FILES] for p in places
    ):
        if not file.exists():
            print(f"absent  {file.stem}", flush=True)  # noqa: T201
            continue
        done = run_apart(file, logs / f"{file.stem}.log", options.pattern, options.timeout)
        for name, (status, why) in done.items():
            print(f"{status:8}{name}{': ' + why if why else ''}", flush=True)  # noqa: T201
        results |= done
    counted = wanted(results, options.only.read_text().split() if options.only else None)
    passed = [name for name, (status, _) in counted.items() if status == "passed"]
    if options.out:
        options.out.write_text("".join(f"{name}\n" for name in passed))
    tried = sum(status != "skipped" for status, _ in counted.values())
    print("\n".join(by_file(counted)))  # noqa: T201
    over = "stock" if options.stock else "ucformat"
    print(f"{len(passed)} of {tried} passed over {over} storage (output: {logs})")  # noqa: T201
    return 0 if len(passed) == tried else 1


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that the tests start
    if not os.environ.get(STOCK):
        use_ours()
    if not torch.cuda.is_available():
        do_without_gpus()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
