"""`ucp fits`, `ucp layout check` and `--view`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from safetensors.numpy import save_file

from tests.cli.conftest import object_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

LAYOUT = """version: 1
mesh: {{tp: 2}}
rules:
  - match: "*"
    place: [{{shard: {dim}, over: tp}}]
"""
VIEW = """version: 1
view:
  - keep: "*"
    states: [weight]
  - rename: '/(.*)/'
    to: 'model.\\1'
"""


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.yaml"
    path.write_text(LAYOUT.format(dim=0))
    return path


@pytest.fixture
def view(tmp_path: Path) -> Path:
    path = tmp_path / "view.yaml"
    path.write_text(VIEW)
    return path


def test_one_that_fits(run: Run, committed: Path, layout: Path) -> None:
    layout.write_text(layout.read_text().replace("[{shard: 0, over: tp}]", "[replicate]"))
    assert "fits: " in run("fits", committed, "-l", layout).stdout
    assert run("fits", committed, "-l", layout, "-q").stdout == "fits\n"


def test_one_that_does_not(run: Run, committed: Path, layout: Path) -> None:
    layout.write_text(LAYOUT.format(dim=7))
    text = run("fits", committed, "-l", layout, code=1).stdout
    assert "does not fit 2 ranks" in text
    assert "rules[0], line 4" in text
    found = object_of(run("fits", committed, "-l", layout, "--json", code=1).stdout)
    assert found["fits"] is False
    assert found["misfits"][0]["rules"] == ["rules[0], line 4 (match '*')"]


def test_a_query(run: Run, catalog: Path, layout: Path) -> None:
    layout.write_text(layout.read_text().replace("[{shard: 0, over: tp}]", "[replicate]"))
    found = object_of(run("fits", "--where", "step >= 0", "-l", layout, "--json", code=1).stdout)[
        "checkpoints"
    ]
    assert len(found) > 1  # the catalog's checkpoints have no files
    assert all("error" in one for one in found)


@pytest.mark.parametrize("words", [[], ["x", "--where", "step > 1"]])
def test_either_one_or_a_query(run: Run, layout: Path, words: list[str]) -> None:
    assert "either REF or --where" in run("fits", *words, "-l", layout, code=2).stderr


def test_a_file_by_itself(run: Run, layout: Path, view: Path) -> None:
    assert run("layout", "check", layout).stdout == f"{layout} is a layout for 2 ranks\n"
    assert run("layout", "check", view).stdout == f"{view} is a view\n"
    layout.write_text("version: 1\nmesh: {tp: 2}\nrules:\n  - match: '*'\n")
    assert "line 4, rules[0].place: Field required" in run("layout", "check", layout, code=2).stderr


def test_which_rule_takes_what(run: Run, committed: Path, layout: Path) -> None:
    layout.write_text(LAYOUT.format(dim=0).replace('"*"', '"nobody"'))
    text = run("layout", "check", layout, "--against", committed, code=1).stdout
    assert "rules[0], line 4 (match 'nobody')        0" in text
    assert "no rule of the section rules matches it" in text
    found = object_of(
        run("layout", "check", layout, "--against", committed, "--json", code=1).stdout
    )
    assert found["rules"] == [{"rule": "rules[0], line 4 (match 'nobody')", "tensors": []}]


def test_what_the_steps_of_a_view_take(run: Run, committed: Path, view: Path) -> None:
    text = run("layout", "check", view, "--against", committed).stdout
    assert "view[1], line 5 (rename /(.*)/)" in text
    assert "model." in text


def test_a_checkpoint_is_seen_through_a_view(
    run: Run, committed: Path, view: Path, tmp_path: Path
) -> None:
    names = run("show", committed, "--view", view, "-q").stdout.split()
    assert names
    assert all(name.startswith("model.") for name in names)
    plain = run("get", committed, names[0].removeprefix("model.")).stdout
    assert run("get", committed, names[0], "--view", view).stdout == plain
    run("convert", committed, tmp_path / "out", "--view", view, "-q")
    assert run("show", tmp_path / "out", "-q").stdout.split() == names


def test_a_view_that_is_none(run: Run, committed: Path, layout: Path) -> None:
    assert "has no view" in run("show", committed, "--view", layout, code=2).stderr
    assert (
        "neither a preset nor a file" in run("show", committed, "--view", "nothing", code=2).stderr
    )


class TestSourceOptions:
    """`--source KEY=VALUE` says what the files of a foreign checkpoint do not."""

    @pytest.fixture
    def foreign(self, tmp_path: Path) -> Path:
        save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    def test_a_kind_that_takes_no_such_option_says_which_it_takes(
        self, run: Run, foreign: Path
    ) -> None:
        error = run("show", foreign, "--source", "layout=megatron", code=2).stderr
        assert "a checkpoint of safetensors is not opened with the option 'layout'" in error

    def test_a_universal_one_takes_none(self, run: Run, committed: Path) -> None:
        assert "takes no options" in run("show", committed, "--source", "vocab=7", code=2).stderr

    @pytest.mark.parametrize("text", ["vocab", "=7"])
    def test_it_is_a_key_and_a_value(self, run: Run, foreign: Path, text: str) -> None:
        assert "write KEY=VALUE" in run("show", foreign, "--source", text, code=2).stderr

    def test_what_it_says_reaches_the_source(self, run: Run, tmp_path: Path) -> None:
        array = zarr.open_group(tmp_path / "z").create_array(
            "a", shape=(4,), chunks=(2,), dtype="float32"
        )
        array[:2] = 1
        assert "missing" in run("get", tmp_path / "z", "a", code=5).stderr
        assert (
            run("get", tmp_path / "z", "a", "--source", "fill_missing=true").stdout
            == "[1. 1. 0. 0.]\n"
        )
