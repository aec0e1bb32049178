"""Programs that start without their imports: forked from a process that has imported torch, which takes 4 s.

One server for each interpreter serves all test processes of a session: the first that needs it
starts it, and it ends with that one. What it forks is a process as any other, that may be killed,
or exit as it likes.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FOLDER", "Program", "run", "ucp"]

#: The environment variable that names the folder with the sockets of the session's servers.
FOLDER = "UCFORMAT_TEST_SERVERS"
_ROOT = Path(__file__).parents[1]
#: What is set before torch is imported, and so is the same for all programs of a server.
_FIXED = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: What commands import, most of it late.
_UCP = (
    "ucformat.cli.main",
    "ucformat.catalog.catalog",
    "ucformat.jobs.convert",
    "ucformat.jobs.verify",
    "ucformat.sources.opening",
)
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL, for ranks whose neighbour failed


@dataclass(frozen=True)
class Program:
    """What to run, by `ranks` processes that know each other as those of torchrun do, or by one that is no rank.

    Args:
        argv: a script or `-m` and a module, and its arguments.
        environment: all of its environment.
        logs: the file for output and errors of each process, or one for all.
        errors: a file for the errors of all processes, apart from their output.
        ranks: 0 for a program that is no rank.
        together: whether the others end when one rank fails, as under torchrun.
        cwd: its working directory.
        modules: what it imports besides what its server has; imported once, before the ranks are
            forked.
    """

    argv: Sequence[str]
    environment: dict[str, str]
    logs: Sequence[str]
    ranks: int = 0
    together: bool = True
    cwd: str = str(_ROOT)
    modules: Sequence[str] = ()
    errors: str | None = None


def run(python: str, modules: Sequence[str], program: Program, timeout: float) -> list[int]:
    """The exit code of each process of a program; -n of one that signal n ended.

    Args:
        python: the interpreter.
        modules: what its server imports; each interpreter and set of modules has a server of its
            own.
        program: what to run.
        timeout: seconds; TimeoutError after these, and the program is killed.
    """
    with _connect(python, modules) as connection:
        connection.settimeout(timeout)
        connection.sendall(json.dumps(asdict(program)).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = connection.recv(65536)
            assert part, "the server of forked programs died"
            answer += part
    codes: list[int] = json.loads(answer)
    return codes


def ucp(
    arguments: Sequence[object], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `ucp` in a process of its own.

    Args:
        arguments: of the command.
        folder: its working directory.
        environment: more of the environment.
    """
    argv = ["-m", "ucformat.cli", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place) / "out", Path(place) / "err"
        more = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
        program = Program(argv, more, [str(out)], cwd=str(folder), errors=str(err))
        (code,) = run(sys.executable, _UCP, program, PATIENCE)
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def _connect(python: str, modules: Sequence[str]) -> socket.socket:
    """A connection to the server of an interpreter, which is started where there is none."""
    if FOLDER not in os.environ:  # a program that is no test, as a benchmark
        folder = tempfile.mkdtemp(prefix="ucf-")
        os.environ[FOLDER] = folder
        atexit.register(shutil.rmtree, folder)
    place = (
        Path(os.environ[FOLDER])
        / hashlib.sha256(repr((python, *modules)).encode()).hexdigest()[:16]
    )
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(place))
            except OSError:
                connection.close()
                _start(python, place, modules)
            else:
                return connection
    raise AssertionError("the server of forked programs does not start")


def _start(python: str, place: Path, modules: Sequence[str]) -> None:
    environment = {
        **os.environ,
        **_FIXED,
        "PYTHONPATH": str(_ROOT),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
    command = [python, "-m", "tests.forkserver", str(place), *modules]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ready = process.stdout.readline()
    assert ready == b"ready\n", f"{' '.join(command)} failed with {process.wait()}"
    atexit.register(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _serve(place: Path, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        _step_once()
    gc.collect()
    gc.freeze()  # so that no collection of a fork copies the pages of all that was imported
    place.unlink(missing_ok=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the launchers are nobody's
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as ready:
        listening.bind(str(place))
        listening.listen()
        ready.register(listening, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while all(
            key.fileobj is listening for key, _ in ready.select()
        ):  # else whoever started it has ended
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                _in_child(_launch, connection)
            connection.close()


def _step_once() -> None:
    """The first step of an optimizer imports torch's compiler."""
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()


def _launch(connection: socket.socket) -> None:
    """Run one program, and answer with its exit codes; end it where whoever asked has gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    request = b""
    while not request.endswith(b"\n"):
        request += connection.recv(65536)
    program = Program(**json.loads(request))
    for module in program.modules:
        importlib.import_module(module)
    port, told = os.pipe()
    children = [_fork(program, rank, port, connection) for rank in range(max(program.ranks, 1))]
    if program.ranks:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told, b"%5d" % store.port * program.ranks)
    codes = _wait(children, connection, together=program.together)
    connection.setblocking(True)
    connection.sendall(json.dumps(codes).encode() + b"\n")


def _wait(
    children: Sequence[int], connection: socket.socket, *, together: bool
) -> list[int | None]:
    """The exit codes of processes; they are killed when whoever asked has gone."""
    codes: list[int | None] = [None] * len(children)
    failed = 0.0
    connection.setblocking(False)
    while None in codes:
        for rank, pid in enumerate(children):
            if codes[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if done else None
        left = [pid for pid, code in zip(children, codes, strict=True) if code is None]
        if together and any(codes):
            failed = failed or time.monotonic()
            _signal(left, signal.SIGKILL if time.monotonic() > failed + _GRACE else signal.SIGTERM)
        with suppress(BlockingIOError):
            if not connection.recv(1):
                _signal(left, signal.SIGABRT)  # their logs get the traceback of every thread
                time.sleep(1)
                os.killpg(0, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def _signal(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        os.kill(pid, number)


def _fork(program: Program, rank: int, port: int, connection: socket.socket) -> int:
    pid = os.fork()
    if not pid:
        connection.close()
        _in_child(_be, program, rank, port)
    return pid


def _be(program: Program, rank: int, port: int) -> None:
    """Be one process of a program."""
    log = os.open(program.logs[rank % len(program.logs)], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(
        os.open(program.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if program.errors else log,
        2,
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(program.environment, **_FIXED)
    if program.ranks:
        _introduce(rank, program.ranks, os.read(port, 5).decode().strip())
    os.chdir(program.cwd)
    first, *rest = program.argv
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*program.argv]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _introduce(rank: int, ranks: int, port: str) -> None:
    """Set what torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_RUN_ID="none",
    )


def _in_child(act: Callable[..., None], *arguments: Any) -> None:
    """Act, and end as an interpreter does, but without taking apart what was imported."""
    code = 1
    try:
        act(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - it is in the log
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
