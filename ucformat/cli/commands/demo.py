"""`ucp demo`: a small run of checkpoints, and what can be done with it."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import time
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import click

from ucformat.cli.ui.options import command
from ucformat.cli.ui.output import Heading
from ucformat.errors import Conflict, UcformatError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.cli.ui.output import Output

_RUN, _RANKS = "tiny", 4
_STEPS, _BETWEEN = (20, 40, 60, 80), 20
_LAST, _BEFORE = _STEPS[-1], _STEPS[-2]
_MAX_LINES = 15  # of the output of a step that people see
_CATALOG = "catalog.db"
_LAYOUT = """version: 1
mesh: {tp: 2}
rules:
  - {match: "*.up_proj.weight", place: [{shard: 0, over: tp}]}
  - {match: "*.down_proj.weight", place: [{shard: 1, over: tp}]}
  - {match: "*", place: [replicate]}
"""
_SLICE = f"""import ucformat
w = ucformat.open('{_RUN}@{_LAST}')['model.layers.0.mlp.up_proj.weight']
print(w.shape, w.dtype, w[0:2, 4:7].tolist())"""
_PLAN = f"""import ucformat
ck, layout = ucformat.open('{_RUN}@{_LAST}'), ucformat.Layout.load('tp2.yaml')
name = 'model.layers.0.mlp.up_proj.weight'
half = ck.plan(layout, rank=1, states='master').execute()[name, 'master']
whole = ck[name].numpy()
print('rank 1 has rows 64 to 127, bit for bit:', half.tobytes() == whole[64:].tobytes())"""
_NEXT = (
    ("ucp show PATH", "your own checkpoint, of any engine, in place"),
    ("ucp register -r PATH", "your own runs, in your catalog; then `ucp ls` and `ucp diff`"),
    ("ucp export --help", "the formats of other engines, under any layout of theirs"),
    ("pip install 'ucformat[torch]'", "save and load from the training loop: ucformat.torch"),
    ("ucp --help", "everything else"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """What was done: in words, by a command for a shell in the folder, with what it printed."""

    title: str
    command: str
    output: str = ""


@command
@click.argument("folder", metavar="[DIR]", required=False)
def demo(folder: str | None, out: Output) -> None:
    """Make a small run of checkpoints, and show what can be done with it.

    DIR is a new or empty folder, by default ucp-demo here. The run is that of a training on four
    ranks of DeepSpeed (ZeRO 3), computed in a second; no engine is needed. Everything is in DIR,
    also the catalog. Every command that is printed can be repeated there.
    """
    from ucformat.settings import using

    began = time.perf_counter()
    place = _new_folder(folder)
    steps: list[Step] = []
    prepare = [f"cd {shlex.quote(str(place))}"]
    if os.environ.get("UCP_CATALOG"):
        prepare.append(f'export UCP_CATALOG="$PWD/{_CATALOG}"')
    people = not (out.as_json or out.quiet)
    with using(catalog=str(place / _CATALOG)), chdir(place):
        losses = _make_run(place)
        told = (
            f"{len(_STEPS)} checkpoints of a training on {_RANKS} ranks, as DeepSpeed's ZeRO 3 saves "
            f"them, are in {place / _RUN}. Repeat any command after:"
        )
        if people:
            out.result(lambda: [told, *(f"  $ {line}" for line in prepare)], dict)
        for step in _walk(losses):
            steps.append(step)
            if people:
                out.result(lambda step=step: _lines(step), dict)  # type: ignore[misc]
    seconds = round(time.perf_counter() - began, 3)
    out.result(
        lambda: ["", Heading("What to try next"), *(f"  {c:<30} {text}" for c, text in _NEXT)],
        lambda: {
            "folder": str(place),
            "catalog": str(place / _CATALOG),
            "prepare": prepare,
            "steps": [asdict(step) for step in steps],
            "next": [{"command": c, "title": text} for c, text in _NEXT],
            "seconds": seconds,
        },
        lambda: [str(place)],
    )


def _new_folder(given: str | None) -> Path:
    """Make the folder: the given one, or the first name that is free."""
    from ucformat.settings import local_path

    if given is None:
        here, number = Path.cwd(), 1
        while (place := here / f"ucp-demo{f'-{number}' if number > 1 else ''}").exists():
            number += 1
    else:
        place = local_path(given)
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise Conflict(
                f"{place} is not an empty folder", hint="name one that does not exist: ucp demo DIR"
            )
    place.mkdir(parents=True, exist_ok=True)
    return place


def _make_run(place: Path) -> dict[int, float]:
    """Train, write what the ranks would save, the layout and the settings, and return the losses."""
    import ucformat
    from ucformat.cli.demo_training import Training
    from ucformat.settings import PROJECT_FILE, using

    # settings that others may write are not trusted, whatever the umask
    number = os.open(place / PROJECT_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(number, "w") as file:  # noqa: PTH123 - of a number, not of a path
        file.write(f'catalog = "{_CATALOG}"\n')
    (place / "tp2.yaml").write_text(_LAYOUT)
    training, losses, run = Training(), {}, place / _RUN
    run.mkdir()
    for step in _STEPS:
        losses[step] = training.train(_BETWEEN)
        part = place / f".{step}"
        with using(catalog="none"):
            ucformat.export(
                training.checkpoint(),
                part,
                "deepspeed",
                stage=3,
                world=_RANKS,
                dtype="float32",
                buffers=[],
            )
        # each of them names the last one, and a run has one such file
        (part / "latest").replace(run / "latest")
        (part / f"global_step{step}").replace(run / f"global_step{step}")
        part.rmdir()
    return losses


def _walk(losses: dict[int, float]) -> Iterator[Step]:
    """Do each step."""
    last, before = f"{_RUN}@{_LAST}", f"{_RUN}@{_BEFORE}"
    yield _done("Record the run in the catalog", f"ucp register -r {_RUN}")
    for step, loss in losses.items():
        done = _done("Note the loss", f"ucp metric {_RUN}@{step} loss={loss:.4f}")
    yield done
    yield _done("List the checkpoints", "ucp ls --columns name,kind,size,metric.loss")
    yield _done("Draw the loss", f"ucp ls \"run = '{_RUN}'\" --plot metric.loss")
    yield _done("List the runs", "ucp runs --metric loss")
    yield _done("Open one, in place", f"ucp show {last}")
    yield _done("Read a slice, and nothing else", f"ucp get {last} lm_head.weight 0:2,0:4")
    yield _done("The same in Python", f'python -c "{_SLICE}"')
    yield _done(
        "Plan what each rank reads under two-way tensor parallelism",
        f"ucp plan {last} --layout tp2.yaml",
    )
    yield _done("Read what one of these ranks holds", f'python -c "{_PLAN}"')
    yield _done("Compare two checkpoints", f"ucp diff {before} {last} --values")
    yield _done(
        "Average them, into a universal checkpoint",
        f"ucp average {before} {last} averaged -s master --overwrite",
    )
    yield _done("Read every byte of it, and check", "ucp verify averaged")
    yield _done(
        "Export it for Hugging Face, vLLM and others",
        "ucp export safetensors averaged model --overwrite --yes",
    )
    yield _served("ucp serve")


def _done(title: str, line: str) -> Step:
    """Run a command in this process, as a shell would."""
    from ucformat.cli.main import ucp

    program, *words = shlex.split(line)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        if program == "python":
            exec(words[-1], {"__name__": "__main__"})  # noqa: S102 - one of the texts above
        else:
            code = click.Group.main(ucp, words, prog_name="ucp", standalone_mode=False)
            if code:
                raise UcformatError(f"{line} failed, with exit code {code}")
    return Step(title, line, printed.getvalue())


def _served(line: str) -> Step:
    """Serve the catalog, and fetch a file of the run; where that is not installed, tell how."""
    from ucformat.settings import load_settings

    title = "Serve all of them as a hub of models"
    try:
        import ucformat.web.app  # noqa: F401 - whether all that it needs is installed
    except ImportError:
        return Step(title, f"pip install 'ucformat[web]' && {line}")
    environment = {**os.environ, "UCP_CATALOG": str(load_settings().catalog_url())}
    words = [sys.executable, "-m", "ucformat.cli", "serve", "--port", "0", "--quiet"]
    with _running(words, environment) as url:
        address = f"{url}/{_RUN}/resolve/main/model.safetensors"
        with urlopen(address, timeout=60) as answer:  # noqa: S310 - our own server
            size = len(answer.read())
    fetched = f"GET /{_RUN}/resolve/main/model.safetensors: {size:,} bytes, computed from the ranks' files\n"
    return Step(f"{title}, without a copy", line, fetched)


@contextmanager
def _running(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The url of a server, in a process that ends with the block."""
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
        try:
            assert server.stdout is not None  # noqa: S101
            if not (url := server.stdout.readline().strip()):
                raise UcformatError("the server did not start", hint="`ucp serve` says why")
            yield url
        finally:
            with suppress(ProcessLookupError):
                server.terminate()


def _lines(step: Step) -> Iterator[str]:
    """A step as people see it, its output shortened."""
    yield ""
    yield Heading(step.title)
    yield from f"  $ {step.command}".split("\n")  # further lines of Python cannot be indented
    lines = step.output.splitlines()
    shown = lines if len(lines) <= _MAX_LINES else [*lines[: _MAX_LINES - 1], "…"]
    yield from (f"  {line}".rstrip() for line in shown)
