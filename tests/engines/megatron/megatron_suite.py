"""Run Megatron-Core's own tests of `dist_checkpointing` with our strategies in place of its own.

    python -m tests.engines.megatron.megatron_suite MEGATRON-LM --stock --out stock.txt
    python -m tests.engines.megatron.megatron_suite MEGATRON-LM --only stock.txt

The tests are those of a checkout of Megatron-LM of the version that is installed in
`.engines/megatron`, run as they are, on the CPU, by forked ranks with Gloo. Where they name
`torch_dist`, or its classes, they get those of `ucformat.torch.megatron.strategies`. A test has
passed if it has on all ranks. After a few tests, and one that fails or takes longer than
`--timeout`, the ranks are ended, and new ones go on with the next test. `--stock` keeps Megatron's
strategies: what passes there, which `--out` notes, is what ours have to pass (`--only`). What ends
is kept in the file of `--results`, so that the same command goes on after it was stopped.
docs/guides/megatron.md names the results.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.engines.megatron.live import emerging, fused_adam

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER = Path("tests/unit_tests/dist_checkpointing")
_GRACE = 3.0  # seconds for the other ranks to end a test that one has failed
_PORT = 29800
_TESTS_OF_ONE_START = 6  # Gloo's threads of a test's process groups, hundreds, end with the ranks
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


def _provide_grouped_gemm() -> None:
    """Let experts be stacked: what multiplies them needs CUDA, and tests of checkpoints multiply nothing."""
    from megatron.core.transformer.moe import grouped_gemm_util

    grouped_gemm_util.grouped_gemm = types.ModuleType("grouped_gemm")


def use_ours() -> None:
    """Put our strategies where Megatron names its own.

    They are given the optimizer, as `strategies(optimizer)` is, whose state a test has asked for.
    """
    from megatron.core.dist_checkpointing.strategies import base
    from megatron.core.dist_checkpointing.strategies import torch as theirs

    from ucformat.engines.megatron.strategy_classes import LoadStrategy, SaveStrategy

    asked = _note_optimizers()

    class Save(SaveStrategy):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(None, None, {})

        def save(self, state: Any, folder: Any) -> None:
            self._optimizer = asked[-1] if asked else None
            super().save(state, folder)
            if dist.get_rank() == 0:
                Path(folder, ".metadata").touch()  # whose presence tests take for that of a save

    class Load(LoadStrategy):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(None, None, "report", {})

        def load(self, *arguments: Any) -> dict[str, Any]:
            self._optimizer = asked[-1] if asked else None
            return super().load(*arguments)

    def register() -> None:
        for backend in ("torch_dist", "ucformat"):
            for action, ours in {"SAVE": Save, "LOAD": Load}.items():
                kind = base.StrategyAction[f"{action}_SHARDED"]
                base.register_default_strategy(kind, backend, 1, ours())

    theirs.TorchDistSaveShardedStrategy = Save
    theirs.TorchDistLoadShardedStrategy = Load
    theirs.register_default_torch_strategies = register
    register()


def _note_optimizers() -> list[Any]:
    """The optimizers in the order in which they are asked for their state."""
    from megatron.core.optimizer import distrib_optimizer, layer_wise_optimizer, optimizer

    asked: list[Any] = []

    def note(kind: Any) -> None:
        stock = kind.sharded_state_dict

        def sharded_state_dict(self: Any, *args: Any, **how: Any) -> Any:
            out = stock(self, *args, **how)
            asked.append(self)  # one that chains others after these
            return out

        kind.sharded_state_dict = sharded_state_dict

    note(distrib_optimizer.DistributedOptimizer)
    note(layer_wise_optimizer.LayerWiseDistributedOptimizer)
    note(optimizer.ChainedOptimizer)
    note(optimizer.Float16OptimizerWithFloat16Params)
    note(optimizer.FP32Optimizer)
    return asked


class _OnCpu(TorchFunctionMode):
    """Makes and moves tensors on the CPU where a test or Megatron asks for a CUDA device."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _no_cuda(value) for key, value in (kwargs or {}).items()}
        return func(*map(_no_cuda, args), **kwargs)


def _no_cuda(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value


def do_without_gpus(ranks: int) -> None:
    """Let Megatron and its tests run on the CPU, with Gloo."""
    from tests.engines.megatron.load_megatron import maker

    maker().without_cuda()
    _OnCpu().__enter__()  # until the process ends, and in those that it forks
    torch.cuda.device_count = lambda: ranks
    start, group = dist.init_process_group, dist.new_group

    def with_gloo(backend: str | None = None, **how: Any) -> None:
        start("gloo" if backend in ("nccl", None) else backend, **how)

    def group_with_gloo(*args: Any, backend: str | None = None, **how: Any) -> Any:
        return group(*args, backend="gloo" if backend == "nccl" else backend, **how)

    def on_cpu(group: Any, _: str, *args: Any, **how: Any) -> Any:
        return mesh(group, "cpu", *args, **how)

    mesh = dist.DeviceMesh.from_group
    dist.DeviceMesh.from_group = on_cpu
    dist.init_process_group, dist.new_group = with_gloo, group_with_gloo


def stand_in() -> None:
    """Put in place what Megatron and its tests take from packages that need a GPU."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    sys.modules[name] = mock.MagicMock()  # kernels in Triton
    name = "nvidia_resiliency_ext.checkpointing.local.base_state_dict"
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    sys.modules[name].TensorAwareStateDict = type("TensorAwareStateDict", (), {})  # type: ignore[attr-defined]
    name = "transformer_engine.pytorch.fp8"  # which tests of plain experts import, too
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].check_fp8_support = lambda: (False, "no GPU")  # type: ignore[attr-defined]
    sys.modules[name].fp8_autocast = None  # type: ignore[attr-defined]
    emerging.provide()

    # the layers of Transformer Engine: those of Megatron itself
    gpt: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    local, block = gpt.get_gpt_layer_local_spec, gpt.get_gpt_decoder_block_spec
    taken = inspect.signature(local).parameters

    def layer_spec(*args: Any, **how: Any) -> Any:
        return local(*args, **{name: value for name, value in how.items() if name in taken})

    def block_spec(config: Any, use_transformer_engine: bool, *args: Any, **how: Any) -> Any:
        return block(config, False, *args, **how)

    gpt.get_gpt_layer_with_transformer_engine_spec = layer_spec
    gpt.get_gpt_decoder_block_spec = block_spec
    bert: Any = importlib.import_module("megatron.core.models.bert.bert_layer_specs")
    bert.bert_layer_with_transformer_engine_spec = bert.bert_layer_local_spec
    t5: Any = importlib.import_module("megatron.core.models.T5.t5_spec")
    for part in ("encoder", "decoder"):
        spec = getattr(t5, f"{part}_model_with_local_spec")
        setattr(t5, f"{part}_model_with_transformer_engine_default_spec", spec)

    fused_adam.provide()
    _provide_grouped_gemm()


def prepare(checkout: Path, ranks: int) -> None:
    """Import what all ranks need, before they are forked."""
    import tests
    import tests.engines.megatron.live.beside

    tests.__path__.append(str(checkout / "tests"))
    sys.path.append(str(checkout))  # for `megatron.training`
    import megatron

    megatron.__path__.append(str(checkout / "megatron"))
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    downloads = types.ModuleType(name)
    downloads.download_and_extract_asset = lambda **_: None  # type: ignore[attr-defined]
    sys.modules[name] = downloads
    stand_in()
    do_without_gpus(ranks)
    utils: Any = importlib.import_module("megatron.core.utils")
    utils.is_te_min_version = lambda *_, **__: False  # which fails without Transformer Engine
    importlib.import_module("tests.unit_tests.dist_checkpointing")
    for name in [n for n in sys.modules if n.startswith("tests.unit_tests")]:
        del sys.modules[name]  # which ask for the rank when they are imported


class _Told:
    """Notes how each test ended on this rank, at once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" or report.when == "teardown":
            why = ""
            if report.failed:
                why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", ""))
            elif report.skipped and isinstance(report.longrepr, tuple):
                why = report.longrepr[2]
            why = " ".join((why or "").split())[:400]
            self._write(report.nodeid, report.outcome, why)

    def _write(self, test: str, outcome: str, why: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{test}\t{outcome}\t{why}\n")


class _Collected:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.ids = [item.nodeid for item in items]


def _options(checkout: Path) -> list[str]:
    return [f"--rootdir={checkout}", "-p", "no:cacheprovider", "-p", "no:randomly", "-q"]


def _collect(checkout: Path, files: Sequence[Path], log: Path) -> list[str]:
    """The names of all tests; in a process of its own, so that this one imports none."""
    names = log / "names.txt"
    if not (process := os.fork()):
        _to(log / "collect.log")
        found = _Collected()
        pytest.main(
            [*_options(checkout), "--collect-only", "--maxfail=0", *map(str, files)],
            plugins=[found],
        )
        names.write_text("\n".join(found.ids))
        os._exit(0)
    os.waitpid(process, 0)
    return names.read_text().splitlines() if names.exists() else []


def _to(log: Path) -> None:
    """Send this process's output to a file."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _run_rank(rank: int, ranks: int, checkout: Path, ids: Sequence[str], logs: Path) -> None:
    """Run tests as one rank, until one fails; never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.chdir(checkout)  # from where the tests are named
    program = sys.modules["__main__"]  # which processes that Megatron starts would import there
    program.__spec__, program.__file__ = None, None
    _to(logs / f"rank-{rank}.log")
    code = 1
    try:
        told = _Told(logs / f"told-{rank}.txt")
        code = int(
            pytest.main(
                [*_options(checkout), "-x", f"--basetemp={logs}/temp-{rank}", *ids], plugins=[told]
            )
        )
    finally:
        os._exit(code)


def _told(file: Path) -> dict[str, tuple[str, str]]:
    out: dict[str, tuple[str, str]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        test, outcome, why = line.split("\t", 2)
        if outcome != "started":
            earlier = out.get(test)
            if earlier is None or earlier[0] == "passed":
                out[test] = (outcome, why)
    return out


def _joined(told: list[dict[str, tuple[str, str]]], test: str) -> tuple[str, str] | None:
    """How a test ended on all ranks; None if it did not on some."""
    of_ranks = [t.get(test) for t in told]
    failed = next((r for r in of_ranks if r is not None and r[0] == "failed"), None)
    if failed is not None:
        return failed
    if any(r is None for r in of_ranks):
        return None
    skipped = next((r for r in of_ranks if r is not None and r[0] == "skipped"), None)
    return skipped if skipped is not None and all(r == skipped for r in of_ranks) else of_ranks[0]


class Results(dict[str, tuple[str, str]]):
    """How each test ended, and why; kept in a file, if one is given, as soon as it is known."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self.file = file
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                test, outcome, why = line.split("\t", 2)
                self[test] = (outcome, why)

    def note(self, test: str, result: tuple[str, str]) -> None:
        """Keep and print how a test ended."""
        self[test] = result
        print(f"{result[0]:8}{test}: {result[1]}", flush=True)  # noqa: T201
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(f"{test}\t{result[0]}\t{result[1]}\n")


def run_tests(
    checkout: Path, ids: list[str], ranks: int, logs: Path, timeout: float, results: Results
) -> None:
    """Run the tests whose end is not known, and note it."""
    left, start = [i for i in ids if i not in results], 0
    while left:
        start += 1
        now = left[:_TESTS_OF_ONE_START]
        folder = logs / f"start-{os.getpid()}-{start}"
        folder.mkdir()
        os.environ |= {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_PORT + os.getpid() % 100 * 10 + start % 10),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes, ended = list[int](), set[int]()
        try:
            for rank in range(ranks):
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if not (process := os.fork()):
                    _run_rank(rank, ranks, checkout, now, folder)
                processes.append(process)
            index = _watch(processes, ended, folder, now, results, timeout)
        finally:  # also where this process is told to end
            _end(processes, ended)
        left = left[index:]


def _end(processes: Sequence[int], ended: set[int]) -> None:
    """End the ranks, with what they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if process not in ended:
            os.waitpid(process, 0)


def _watch(
    processes: Sequence[int],
    ended: set[int],
    folder: Path,
    left: Sequence[str],
    results: Results,
    timeout: float,
) -> int:
    """Note how tests end until one fails or none is left; how many were done."""
    at, index, ranks = time.monotonic(), 0, len(processes)
    failed: float | None = None
    while True:
        time.sleep(0.05)
        told = [_told(folder / f"told-{rank}.txt") for rank in range(ranks)]
        while index < len(left) and (result := _joined(told, left[index])) is not None:
            if result[0] == "failed":
                break
            results.note(left[index], result)
            index, at = index + 1, time.monotonic()
        ended |= {p for p in processes if p not in ended and os.waitpid(p, os.WNOHANG)[0] == p}
        if index == len(left):
            return index
        result = _joined(told, left[index])
        if result is not None and failed is None:
            failed = time.monotonic()
        late = time.monotonic() - at > timeout
        if len(ended) == ranks or late or (failed and time.monotonic() - failed > _GRACE):
            why = f"not done after {timeout:g} s" if late else "its ranks ended"
            results.note(left[index], result or ("failed", why))
            return index + 1


def main(argv: Sequence[str]) -> int:
    """Run the tests, and print how many passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--stock", action="store_true", help="run over Megatron's own strategies")
    parser.add_argument("--ranks", type=int, default=8, help="as many as the tests ask for: 8")
    parser.add_argument("--out", type=Path, help="write the names of the tests that passed here")
    parser.add_argument("--only", type=Path, help="run the tests that are named in this file only")
    parser.add_argument(
        "--results", type=Path, help="note here how tests ended; those noted are not run again"
    )
    parser.add_argument("--logs", type=Path, help="keep the output in this folder")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each test: 60")
    parser.add_argument("--files", nargs="*", default=(), help="run these files only")
    parser.add_argument("-k", dest="pattern", default="", help="run tests with this in their names")
    options = parser.parse_args(argv)
    checkout = options.checkout.resolve()
    os.environ["UCP_CATALOG"] = "none"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the ranks end, too
    torch.set_num_threads(1)  # before ranks are forked
    logs = options.logs or Path(tempfile.mkdtemp(prefix="megatron-suite-"))
    logs.mkdir(parents=True, exist_ok=True)
    prepare(checkout, options.ranks)
    if not options.stock:
        use_ours()
    folder = checkout / _FOLDER
    files = [folder / f"{name}.py" for name in options.files] or [folder]
    ids = [i for i in _collect(checkout, files, logs) if options.pattern in i]
    if options.only:
        wanted = set(options.only.read_text().splitlines())
        ids = [i for i in ids if i in wanted]
    results = Results(options.results)
    run_tests(checkout, ids, options.ranks, logs, options.timeout, results)
    ended = {test: results[test][0] for test in ids}
    passed = [test for test, outcome in ended.items() if outcome == "passed"]
    if options.out:
        options.out.write_text("".join(f"{test}\n" for test in passed))
    tried = sum(outcome != "skipped" for outcome in ended.values())
    over = "Megatron's" if options.stock else "ucformat's"
    print(f"{len(passed)} of {tried} passed over {over} strategies (output: {logs})")  # noqa: T201
    return 0 if len(passed) == tried else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
