"""What holds for every command: documented, quick to help, well-behaved in pipes, honest when it fails."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from tests.exporters.sources import universal
from tests.fakes import manifest_file, random_array
from ucformat import errors
from ucformat._version import __version__
from ucformat.catalog.catalog import Catalog
from ucformat.cli.main import ucp
from ucformat.cli.program import LazyGroup
from ucformat.texts import bytes_text, clean, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Run, Shell

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
HEAVY = (
    "numpy",
    "pydantic",
    "rich",
    "sqlalchemy",
    "yaml",
    "ml_dtypes",
    "fsspec",
    "xxhash",
    "torch",
    "ucformat.checkpoint",
)


COMMON = ("--json", "-q", "--quiet", "--catalog")


def _walk(group: LazyGroup, path: str = "ucp") -> Iterator[tuple[str, click.Command, str]]:
    for name, text in chain(*group.lines().values()):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, LazyGroup):
            yield from _walk(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command, text


COMMANDS = list(_walk(ucp))


def _section(path: str) -> str:
    """The section of a command; before that of a format, what all formats have in common."""
    found = re.search(rf"^###? {path}\n(.*?)(?=^##|\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/cli.md has no section {path}"
    group = "ucp export"
    return (_section(group) if path.startswith(f"{group} ") else "") + found[1]


@pytest.mark.parametrize(("path", "command", "text"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_every_command_and_option_is_documented(
    path: str, command: click.Command, text: str
) -> None:
    section = _section(path)
    common = DOCS[: DOCS.index("\n## ucp ")]
    assert f"`{path}`" in common
    for param in command.params:
        for spelling in (
            [*param.opts, *param.secondary_opts] if isinstance(param, click.Option) else []
        ):
            where = common if spelling in COMMON else section
            assert re.search(rf"`{spelling}[ `]", where), f"{path} {spelling} is not in docs/cli.md"
        if isinstance(param, click.Argument):
            assert str(param.metavar) in section
    documented = set(
        re.findall(r"(?<=[`\s])--[a-z-]+", re.sub(r"```.*?```", "", section, flags=re.DOTALL))
    )
    assert documented <= {o for p in command.params for o in (*p.opts, *p.secondary_opts)}, (
        "docs/cli.md has options that are no more"
    )


@pytest.mark.parametrize(("path", "command", "text"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_every_command_has_json_and_quiet_and_help(
    path: str, command: click.Command, text: str
) -> None:
    spellings = {o for p in command.params for o in p.opts}
    assert {"--json", "-q", "--quiet"} <= spellings
    assert command.help
    assert text.endswith(".")
    assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_every_exit_code_is_documented() -> None:
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.UcformatError)
    ]
    for code in {c.exit_code for c in classes}:
        assert f"\n| {code} | " in DOCS


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"ucp {__version__}\n"
    text = run("--help").stdout
    assert run("-h").stdout == text
    for name in ucp.lazy:
        assert f"\n  {name} " in text
    assert run(code=2).stderr.startswith("Usage: ucp ")
    assert "the commands are demo, show" in run("shwo", code=2).stderr


def test_help_loads_nothing_heavy() -> None:
    every = [["--help"], ["--version"], *([*path.split()[1:], "-h"] for path, _, _ in COMMANDS)]
    code = (
        "import sys\nfrom ucformat.cli.main import ucp\n"
        f"for args in {every}:\n"
        "    try: ucp.main(args)\n"
        "    except SystemExit as e: assert not e.code\n"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_schema_of_layout_files(run: Run) -> None:
    from ucformat.schema.layout import json_schema

    assert json.loads(run("layout", "schema").stdout) == json_schema()
    assert json.loads(run("layout", "schema", "--json").stdout) == json_schema()


def test_errors_as_json(run: Run, tmp_path: Path) -> None:
    result = run("show", tmp_path / "nothing", "--json", code=3)
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert list(error) == ["type", "message", "hint", "exit_code"]
    assert error["exit_code"] == 3
    usage = json.loads(run("show", "--json", code=2).stderr)["error"]
    assert (usage["type"], usage["exit_code"]) == ("UsageError", 2)
    assert "SRC" in usage["message"]


def test_exit_codes_of_real_processes(shell: Shell, committed: Path, tmp_path: Path) -> None:
    assert shell(f"ucp show {committed}").returncode == 0
    assert shell(f"ucp show {tmp_path}").returncode == 3
    assert shell("ucp show").returncode == 2
    done = shell(f"ucp convert {committed} {committed}")
    assert done.returncode == 4
    assert re.fullmatch(r"error: .+\nhint: .+\n", done.stderr)
    (tmp_path / "manifest.json").write_bytes(manifest_file({"format": "ucformat", "version": 99}))
    assert shell(f"ucp show {tmp_path}").returncode == 7
    (tmp_path / "manifest.json").write_text("no")
    assert shell(f"ucp show {tmp_path}").returncode == 5


def test_the_operating_system_s_errors_are_a_line(shell: Shell, committed: Path) -> None:
    done = shell(f"ucp show {committed} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


def test_a_traceback_on_request(shell: Shell, tmp_path: Path) -> None:
    done = shell(f"ucp show {tmp_path}", UCP_DEBUG="1")
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-2].startswith("error: ")
    assert done.returncode == 3
    assert not shell(f"ucp show {tmp_path}", UCP_DEBUG="0").stderr.startswith("Traceback")


def test_a_reader_that_goes_away_is_no_error(shell: Shell, committed: Path) -> None:
    for line in (f"ucp show {committed} | head -1", f"ucp show {committed} -t '*' | true"):
        done = shell(line)
        assert done.stderr == ""
        assert done.returncode in (0, 141)
    assert shell(f"(sleep 1; ucp show {committed}) | true").returncode == 141


def test_pipes_get_plain_text(shell: Shell, committed: Path, tmp_path: Path) -> None:
    for line in (
        f"ucp show {committed} -t '*'",
        f"ucp show {committed}",
        f"ucp verify {committed}",
        f"ucp convert {committed} {tmp_path / 'dst'}",
        f"ucp show {tmp_path / 'none'}",
    ):
        done = shell(line, TERM="xterm-256color", COLUMNS="20")
        assert "\x1b" not in done.stdout + done.stderr
        assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("env", "colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_a_terminal_gets_colours_unless_told_not_to(
    committed: Path, env: dict[str, str], colour: bool
) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ucformat.cli", "show", str(committed), "-t", "*"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **env}
    subprocess.run(command, stdout=slave, stderr=subprocess.DEVNULL, env=environ, check=True)
    os.close(slave)
    text = b""
    try:
        while data := os.read(master, 1 << 16):
            text += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert (b"\x1b[" in text) is colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode())
    assert max(map(len, plain.splitlines())) <= 80


def test_text_for_people() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 50)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1024.0 TiB",
    ]  # fmt: skip
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefgh", 5) == "ab…gh"
    assert shorten("abcdefgh", 1) == "…"
    assert shorten("abcdefgh", None) == "abcdefgh"
    assert clean("a\tb\x1b\udcff\n") == "a\\tb\\x1b\\udcff\n"


def test_a_command_that_was_meant() -> None:
    run = CliRunner().invoke(ucp, ["shwo"])
    assert run.exit_code == 2
    assert "did you mean show?" in run.stderr


def test_a_shell_completes_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    source = universal(
        tmp_path / "runs" / "run7" / "1", {("w", "weight"): random_array((3,), "float32")}, step=500
    )
    with Catalog() as catalog:
        catalog.record(source.manifest, source.url)
        name = catalog.get(source.id)
    assert name.run
    for words, cword, wanted in (
        ("ucp sh", "1", "show"),
        (f"ucp show {name.run[:1]}", "2", f"{name.run}@500"),
        (f"ucp show {name.run}@l", "2", f"{name.run}@latest"),
    ):
        env = {"_UCP_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": cword}
        run = CliRunner(env=env).invoke(ucp, prog_name="ucp")
        assert f"plain,{wanted}" in run.stdout.split(), (words, run.stdout, run.stderr)
