"""What a foreign checkpoint's files do not say: every command takes it, and hints name it as the command does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.megatron_deepspeed import FLAT, gpt, write
from tests.engines.deepspeed.test_evidence import LAYER, added
from tests.engines.deepspeed.test_megatron_deepspeed import SMALL
from ucformat.cli.main import ucp
from ucformat.cli.program import LazyGroup
from ucformat.errors import AmbiguousLayout, option_text, spelling_options
from ucformat.sources.base import options_of
from ucformat.sources.registry import all_sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.cli.conftest import Run

NAME = LAYER + "adapter.up.weight"


@pytest.fixture(autouse=True)
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A DeepSpeed checkpoint of which one matrix may be cut or not."""
    folder = tmp_path / "foreign"
    write(
        folder, added(gpt(**SMALL), NAME, "replicate", dict.fromkeys(FLAT, np.zeros((3, 8)))), tp=2
    )
    return folder


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    file = tmp_path / "layout.yaml"
    file.write_text("version: 1\nmesh: {dp: 1}\nrules: [{match: '*', place: [replicate]}]\n")
    return file


#: Each command that is given a place, or of which a place is read: how it is called on one that
#: cannot be opened so.
OPENING: dict[str, Sequence[str]] = {
    "show": ["{place}"],
    "get": ["{place}", NAME],
    "plan": ["{place}", "--layout", "{layout}"],
    "fits": ["{place}", "--layout", "{layout}"],
    "convert": ["{place}", "{tmp}/made"],
    "materialize": ["{place}", "{tmp}/other"],
    "compact": ["{place}", "{tmp}/other"],
    "patch": ["{tmp}/base", "{place}", "{tmp}/patched"],
    "copy": ["{place}", "{tmp}/copied"],
    "verify": ["{place}"],
    "attest": ["{place}"],
    "layout check": ["{layout}", "--against", "{place}"],
    "diff": ["{place}", "{place}"],
    "register": ["{place}"],
    "reindex": ["{place}"],
    "average": ["{place}", "{tmp}/twin", "{tmp}/averaged"],
    "merge": ["--method", "slerp", "{place}", "{tmp}/twin", "{tmp}/merged"],
    **{
        f"export {kind}": ["{place}", "{tmp}/exported", "--dry-run"]
        for kind in ("safetensors", "dcp", "deepspeed-universal", "torch", "orbax")
    },
    **{
        f"export {kind}": ["{place}", "{tmp}/exported", "--dry-run", "--raw"]
        for kind in ("npz", "npy")
    },
    "export deepspeed": ["{place}", "{tmp}/exported", "--dry-run", "--tp", "1", "--world", "2"],
}
#: Those that ask the catalog, storage or nobody what a checkpoint is, and open none of others.
OTHERS = {
    "demo",
    "import mlflow",
    "import tensorboard",
    "import wandb",
    "serve",
    "sign",
    "thin",
    *(
        "doctor",
        "layout schema",
        "ls",
        "runs",
        "lineage",
        "sql",
        "tag",
        "untag",
        "metric",
        "note",
        "hold",
        "release",
        "link",
    ),
    *(
        "log",
        "delete",
        "restore",
        "retain",
        "gc",
        "alias set",
        "alias rm",
        "alias list",
        "alias log",
    ),
    *("cache", "catalog info", "catalog upgrade"),
}
#: Those of OPENING that are for universal checkpoints, of which no source needs to be told anything.
UNIVERSAL = {"copy", "materialize", "compact"}
#: Those that refuse these tensors: for their names, and because they are of no GGUF file.
REFUSING = {"export megatron", "export gguf"}
ASK = ["--source", "cuts=*adapter*=replicate"]


def commands(group: LazyGroup = ucp, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, LazyGroup):
            yield from commands(found, f"{path}{name} ")
        elif found is not None:
            yield path + name, found


def test_these_are_all_commands() -> None:
    assert {name for name, _ in commands()} == OPENING.keys() | OTHERS | REFUSING
    takes = {name for name, c in commands() if any(p.name == "options" for p in c.params)}
    # a server goes on
    assert takes - {"serve"} == (OPENING.keys() | REFUSING) - UNIVERSAL


@pytest.mark.parametrize("wrapped", [False, True], ids=["deepspeed", "trainer"])
@pytest.mark.parametrize("name", OPENING)
def test_each_command_takes_it_and_its_hint_says_so(
    run: Run, place: Path, layout: Path, tmp_path: Path, name: str, wrapped: bool
) -> None:
    if wrapped:
        (place / "trainer_state.json").write_text("{}")
    shutil.copytree(place, tmp_path / "twin")
    if name == "patch":
        run("convert", place, tmp_path / "base", *ASK)
    words = [
        *name.split(),
        *(w.format(place=place, layout=layout, tmp=tmp_path) for w in OPENING[name]),
    ]
    if name == "reindex":  # which looks for whatever is there, and fails last
        result = run(*words, code=1)
        assert NAME in result.stdout
        assert "`ucp show PLACE` shows why" in result.stderr
        assert NAME not in run(*words, *ASK).stdout
        return
    error = run(*words, code=2).stderr
    assert f"--source cuts={NAME}=replicate" in error
    assert "--source layout=FILE" in error
    assert "options=" not in error
    assert "DeepSpeed(" not in error
    if name in UNIVERSAL:
        assert f"`ucp convert SRC DST --source cuts={NAME}=replicate`" in error
    else:
        assert "ucp convert" not in error
        run(*words, *ASK)


def test_a_tree_is_registered_with_them(run: Run, place: Path, tmp_path: Path) -> None:
    run("convert", place, place / "inside" / "made", *ASK)
    shutil.copytree(place, tmp_path / "foreign2", ignore=shutil.ignore_patterns("inside"))
    assert run("register", "-r", tmp_path, code=1).stderr.count("could not be read") == 1
    step = next(place.glob("global_step*")).name
    found = {
        str(Path(p).relative_to(tmp_path)) for p in _urls(run, "register", "-r", tmp_path, *ASK)
    }
    assert found == {f"foreign/{step}", f"foreign2/{step}", "foreign/inside/made"}
    assert len(_urls(run, "reindex", tmp_path, *ASK)) == 3


def _urls(run: Run, *words: object) -> set[str]:
    return {
        url for c in json.loads(run(*words, "--json").stdout)["checkpoints"] for url in c["urls"]
    }


def test_where_it_cannot_be_meant(run: Run, layout: Path) -> None:
    assert (
        "needs REF"
        in run("fits", "--where", "step > 1", "-l", layout, "--source", "a=1", code=2).stderr
    )
    assert "--against" in run("layout", "check", layout, "--source", "a=1", code=2).stderr


def test_sources_have_the_options_that_their_hints_name() -> None:
    known = {source.kind: set(options_of(source)) for source in all_sources()}
    known["huggingface"] &= known["deepspeed"] | known["dcp"]  # it is they who are told
    assert known["huggingface"] == known["deepspeed"] | known["dcp"]
    assert known["bytecheckpoint"] >= known["dcp"]  # whose names it has
    named = set()
    root = Path(ucformat.__file__).parent
    rooms = {"pytorch": ["dcp", "torch_save"], "huggingface": ["huggingface"], "distcp": ["dcp"]}
    pickles = [
        k
        for k in known
        if k not in ("gguf", "offload", "orbax", "safetensors", "served", "slime", "zarr")
    ]
    files = {
        "allowed": pickles,
        "opening": list(known),
        "parts": list(known),
        "model_files": list(known),
        "tp_merge": ["deepspeed", "megatron"],
    }
    for file in sorted([*(root / "sources").rglob("*.py"), *(root / "engines").rglob("*.py")]):
        room = file.parent.name
        kinds = (
            files.get(file.stem) or rooms.get(room) or [k for k in known if k in (room, file.stem)]
        )
        for option in re.findall(r"option_text\(\s*['\"](\w+)['\"]", file.read_text()):
            assert kinds, f"{file} names the option {option}: of which source is it?"
            assert all(option in known[k] for k in kinds), (file, option)
            named.add(option)
    assert named >= {
        "layout",
        "cuts",
        "groups",
        "owners",
        "allow",
        "optimizer",
        "vocab",
        "fill_missing",
    }


def test_an_option_is_written_alike_for_all_sources() -> None:
    how: dict[str, set[str]] = {}
    for source in all_sources():
        for name, field in options_of(source).items():
            how.setdefault(name, set()).add(field.metadata["how"])
            assert len(field.metadata["text"]) > 20
    assert all(len(kinds) == 1 for kinds in how.values()), how


@pytest.mark.parametrize("text", ["fill_missing=yes", "vocab=many"])
def test_what_an_option_cannot_be(run: Run, place: Path, text: str) -> None:
    assert f"--source {text}: write" in run("show", place, "--source", text, code=2).stderr


def test_the_python_names_them_as_it_takes_them(place: Path, layout: Path) -> None:
    for act in (
        lambda **o: ucformat.open(place, **o),
        lambda **o: ucformat.verify(place, **o),
        lambda **o: ucformat.fits(place, layout, **o),
    ):
        with pytest.raises(AmbiguousLayout) as failure:
            act()
        assert "ucformat.open(…, options={'layout': ucformat.Layout.load(file)})" in str(
            failure.value
        )
        assert "--source" not in str(failure.value)
        act(options={"cuts": {"*adapter*": "replicate"}})


def test_the_spelling_ends_with_the_command() -> None:
    with spelling_options(lambda name, value, text: f"{name}:{value}:{text}"):
        assert option_text("optimizer") == "optimizer:False:false"
    assert option_text("vocab", "7") == "ucformat.open(…, options={'vocab': 7})"
