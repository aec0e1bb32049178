"""Options and arguments that commands share, and the decorator that makes a function a command."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.output import Output, showing_warnings
from ucformat.errors import UcformatError, UsageError
from ucformat.settings import local_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from click.shell_completion import CompletionItem

    from ucformat.checkpoint import Checkpoint

    _Type = click.ParamType[int]
    _TimeType = click.ParamType[timedelta]
else:
    _Type = _TimeType = click.ParamType  # generic only in newer versions of click

_REFERENCE = "a path or URL, run@step, run@latest, alias:name, or an id or a prefix of one"

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


class _Size(_Type):
    """Bytes: `1048576`, `64MiB`, `1.5GiB`, `1GB` (a power of ten), `64M` (as 64MiB)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip(), re.ASCII | re.IGNORECASE)
        unit = (
            None
            if match is None
            else {u.lower(): n for u, n in _UNITS.items()}.get(match[2].lower())
        )
        if match is None or unit is None:
            self.fail(
                f"{value!r} is not a size: write bytes, or 64KiB, 1.5MiB, 2GiB, 1GB", param, ctx
            )
        size = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
        if size != int(size) or size < 1:
            self.fail(f"{value!r} is not a whole number of bytes, 1 or more", param, ctx)
        return int(size)


SIZE = _Size()


_MOST_OFFERED = 200  # checkpoints whose references a shell completes


class _Time(_TimeType):
    """A span of time: `90s`, `15m`, `48h`, `7d`, `2w`."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        from ucformat.schema.policy import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


TIME = _Time()


class _Ref(click.Argument):
    """An argument that is a reference to a checkpoint, which the help of its command explains."""


def ref_argument(
    name: str, metavar: str, *, many: bool = False, optional: bool = False
) -> Callable[[Any], Any]:
    """Declare an argument that is a reference to a checkpoint."""
    return click.argument(
        name,
        metavar=metavar,
        cls=_Ref,
        nargs=-1 if many else 1,
        required=not optional,
        shell_complete=_complete,
    )


def _complete(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    """What a shell offers for a reference: those of the catalog that begin so, and paths."""
    from click.shell_completion import CompletionItem

    from ucformat.references import open_catalog

    refs: list[str] = []
    with suppress(UcformatError), open_catalog(begun) as catalog:
        run, at, _ = begun.partition("@")
        where = ""
        if at:
            from ucformat.catalog.filter.syntax import quoted

            where = f"run = {quoted(run)}"
        for entry in catalog.find(where, limit=_MOST_OFFERED):
            refs += (
                [f"{entry.run}@{entry.step}", f"{entry.run}@latest"] if entry.run else [entry.id]
            )
        refs += [f"alias:{alias.name}" for alias in catalog.aliases()]
    offered = [CompletionItem(ref) for ref in dict.fromkeys(refs) if ref.startswith(begun)]
    return offered or [CompletionItem(begun, type="file")]


REF, SRC = ref_argument("ref", "REF"), ref_argument("src", "SRC")


def _use_catalog(ctx: click.Context, _: click.Parameter, url: str | None) -> None:
    from ucformat.settings import load_settings, using

    if url is not None:
        ctx.with_resource(using(catalog=url))
    load_settings()  # report invalid settings before any work is done, not when it is to be recorded


#: For commands that use the catalog: overrides the settings while the command runs.
CATALOG = click.option(
    "--catalog",
    expose_value=False,
    callback=_use_catalog,
    metavar="URL",
    help=(
        "The catalog: a file's path, sqlite:///… or postgresql://….  [default: UCP_CATALOG, "
        "else the settings]"
    ),
)

STATES = click.option(
    "-s",
    "--state",
    "states",
    metavar="STATE",
    multiple=True,
    help="Only tensors in this state: weight, master, exp_avg, … May be repeated.",
)


VIEW = click.option(
    "--view",
    metavar="FILE|PRESET",
    help=(
        "View SRC with other names, shapes and dtypes: a layout file with a section `view`, or "
        "a preset."
    ),
)


#: For commands that are refused if other checkpoints need the files.
IGNORE_DEPENDENT = click.option(
    "--ignore-dependent",
    "ignored",
    metavar="ID",
    multiple=True,
    help=(
        "Proceed although this checkpoint is recorded as needing the files; it may break. The "
        "audit log records it."
    ),
)


def ignore_dependents_of(
    ignored: Sequence[str], urls: Sequence[str], out: Output, name: str
) -> None:
    """Apply `--ignore-dependent`: remove the records that these checkpoints need files."""
    if not ignored:
        return
    from ucformat.jobs.dependents import ignore_dependents

    recorded = {i for url in urls for i in ignore_dependents(url, ignored, command=name)}
    for unknown in [i for i in ignored if i not in recorded]:
        out.note(f"there is no record that {unknown} needs these files")


def _spelling(click_command: click.Command) -> Callable[[str, str, str], str]:
    """The function by which hints spell an option of a source for this command."""
    has_option = any(p.name == "options" for p in click_command.params)

    def spell(name: str, _value: str, text: str) -> str:
        source = f"--source {shlex.quote(f'{name}={text}')}"
        return source if has_option else f"`ucp convert SRC DST {source}`, and use DST"

    return spell


def command(function: Callable[..., None]) -> click.Command:
    """Make a function a command with the options --json and --quiet."""

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **options: Any) -> None:
        from ucformat.errors import spelling_options

        out = Output(as_json=as_json, quiet=quiet)
        with showing_warnings(out), spelling_options(_spelling(click_command)):
            function(*args, out=out, **options)

    click_command = click.command(context_settings={"help_option_names": ["-h", "--help"]})(wrapped)
    click_command.params += [
        click.Option(
            ["as_json", "--json"],
            is_flag=True,
            help="Print one JSON object; errors are JSON on stderr.",
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            help="Print only the result, for scripts; no progress or notes.",
        ),
    ]
    if refs := [str(p.metavar).strip("[]…") for p in click_command.params if isinstance(p, _Ref)]:
        means = "is" if len(refs) == 1 else "are each"
        click_command.epilog = f"{' and '.join(refs)} {means} {_REFERENCE}."
    return click_command


def apply_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Declare options of a command, the first one outermost."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def bundle(
    name: str, kind: type[Any], *options: Callable[[Any], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare options that a command takes together: as one parameter, an instance of a dataclass.

    Args:
        name: of the parameter.
        kind: the dataclass; it has a field for the value of each option.
    """

    def declared() -> None:
        """Only to ask the options for their names."""

    declare = apply_options(*options)
    declare(declared)
    names = {str(param.name) for param in getattr(declared, "__click_params__", ())}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def bundled(**arguments: Any) -> None:
            values = {key: arguments.pop(key) for key in names & arguments.keys()}
            function(**{name: kind(**values)}, **arguments)

        decorated: Callable[..., None] = declare(bundled)
        return decorated

    return decorate


def parse_metric(text: str, hint: str) -> tuple[str, float]:
    """Parse a metric such as `val_loss=2.13`."""
    name, equals, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not equals or not name or number is None:
        raise click.BadParameter(
            f"{text!r} is not NAME=VALUE, such as val_loss=2.13", param_hint=hint
        )
    return name, number


def _parse_metrics(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> dict[str, float]:
    return dict(parse_metric(text, "--metric") for text in texts)


def _read_config(
    _ctx: click.Context, _param: click.Parameter, file: str | None
) -> dict[str, Any] | None:
    if file is None:
        return None
    from ucformat.config_files import read_config_file
    from ucformat.errors import UsageError

    config = read_config_file(Path(file), "configuration")
    if not isinstance(config, dict):
        raise UsageError(
            f"{file} is not a mapping",
            hint="a configuration is a JSON or YAML file of keys and values",
        )
    return config


CONFIG = click.option(
    "--config",
    metavar="FILE",
    callback=_read_config,
    help="The training configuration, JSON or YAML; overrides what the files contain.",
)
STEP = click.option(
    "--step",
    type=click.IntRange(0),
    metavar="N",
    help=(
        "The training step.  [default: the one in the files, else in a name such as checkpoint-500]"
    ),
)
METRIC = click.option(
    "--metric",
    "metrics",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parse_metrics,
    help="A metric to add to those in the files. May be repeated.",
)


def _source_options(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> dict[str, Any] | None:
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(
                f"--source {text}: write KEY=VALUE", hint="for one: --source layout=tp2.yaml"
            )
        if key in options:
            raise UsageError(f"--source {key} is given twice")
        options[key] = _source_value(key, value)
    return options or None


def _source_value(key: str, text: str) -> Any:
    """Convert the value of a source's option; an unknown option stays text, and opening the checkpoint refuses it."""
    from ucformat.sources.base import options_of
    from ucformat.sources.registry import all_sources

    readers = {
        name: field.metadata["how"]
        for source in all_sources()
        for name, field in options_of(source).items()
    }
    return _SOURCE_READERS[readers[key]](key, text) if key in readers else text


def layout_of(text: str) -> Any:
    """A layout from a file, or the name of a preset."""
    from ucformat.geometry.layout import Layout

    path = local_path(text, absolute=False)
    return Layout.load(path) if path.suffix or os.path.exists(path) else text  # noqa: PTH110 - never fails


def _document(key: str, text: str) -> Any:
    from ucformat.config_files import read_config_file

    return read_config_file(local_path(text, absolute=False), f"file of {key}")


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"--source {key}={text}: write {key}=true or {key}=false")
    return text == "true"


def _number(key: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--source {key}={text}: write a number, such as {key}=50257")
    return int(text)


def _cuts(_key: str, text: str) -> dict[str, str]:
    """Parse PATTERN=HOW, separated by commas."""
    cuts: dict[str, str] = {}
    for item in text.split(","):
        pattern, equals, placement = item.rpartition("=")
        if not equals or not pattern or not placement:
            raise UsageError(
                f"--source cuts={text}: write cuts=PATTERN=HOW,…",
                hint="such as --source 'cuts=*position*=replicate'",
            )
        cuts[pattern] = placement
    return cuts


#: The parsers of options, by `how` in the source's options.
_SOURCE_READERS: dict[str, Callable[[str, str], Any]] = {
    "cuts": _cuts,
    "document": _document,
    "flag": _flag,
    "layout": lambda _key, text: layout_of(text),
    "names": lambda _key, text: text.split(","),
    "number": _number,
    "text": lambda _key, text: text,
}


def open_any(ref: str, options: Mapping[str, Any] | None) -> Checkpoint:
    """Open one of several checkpoints, of which only foreign ones need options."""
    import ucformat

    if options:
        with suppress(UcformatError):
            checkpoint = ucformat.open(ref)
            if checkpoint.kind == "ucformat":
                return checkpoint
    return ucformat.open(ref, options=options)


SOURCE = click.option(
    "--source",
    "options",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_source_options,
    help="Information that a foreign checkpoint's files lack: layout=FILE, groups=FILE, … May be repeated. See "
    "docs/sources for each format.",
)


@dataclasses.dataclass(frozen=True)
class Opening:
    """How a command opens checkpoints: with which view, and which options of their source."""

    view: str | None = None
    options: dict[str, Any] | None = None

    def open(self, src: str) -> Checkpoint:
        """Open the checkpoint of a reference."""
        import ucformat

        return ucformat.open(src, view=self.view, options=self.options)


OPENING = bundle("opening", Opening, VIEW, SOURCE)

LOSSY = click.option(
    "--lossy", is_flag=True, help="Also read states that were encoded with loss; see `ucp show`."
)
OLDER = click.option(
    "--older",
    is_flag=True,
    help="Also read tensors that a partial save took from earlier steps; see `ucp show`.",
)


@dataclasses.dataclass(frozen=True)
class RecordedFacts:
    """What a command records in the catalog besides what the files contain."""

    run: str | None = None
    config: dict[str, Any] | None = None
    metrics: dict[str, float] | None = None
    step: int | None = None


def facts_options(run: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the options of `Facts`, with the help of `--run`."""
    name = click.option("--run", metavar="NAME", help=run)
    return bundle("facts", RecordedFacts, name, CONFIG, METRIC, STEP)
