"""What a foreign checkpoint's files do not say: every command takes it, and hints name it as the command does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import ucformat
from tests.sources.megatron_deepspeed import FLAT, gpt, write
from tests.sources.test_deepspeed_evidence import LAYER, SMALL, added
from ucformat.errors import AmbiguousLayout, option_text, spelling_options

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

NAME = LAYER + "adapter.up.weight"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A DeepSpeed checkpoint of which one matrix may be cut or not."""
    folder = tmp_path / "foreign"
    write(folder, added(gpt(**SMALL), NAME, "replicate", dict.fromkeys(FLAT, np.zeros((3, 8)))), tp=2)
    return folder


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    file = tmp_path / "layout.yaml"
    file.write_text("version: 1\nmesh: {dp: 1}\nrules: [{match: '*', place: [replicate]}]\n")
    return file


def test_each_command_takes_it_and_its_hint_says_so(run: Run, place: Path, layout: Path, tmp_path: Path) -> None:
    for words in (
        ("show", place),
        ("verify", place),
        ("fits", place, "--layout", layout),
        ("diff", place, place),
        ("diff", place, place, "--values"),
        ("layout", "check", layout, "--against", place),
        ("convert", place, tmp_path / "made"),
    ):
        error = run(*words, code=2).stderr
        assert f"--source cuts={NAME}=replicate" in error, words
        assert "--source layout=FILE" in error
        assert "options=" not in error
        assert "DeepSpeed(" not in error
        run(*words, "--source", "cuts=*adapter*=replicate")
    words = ("diff", place, tmp_path / "made", "--what", "tensors", "--values", "--exit-code")
    run(*words, "--source", "cuts=*adapter*=replicate")
    error = run("materialize", place, tmp_path / "other", code=2).stderr
    assert f"`ucp convert SRC DST --source cuts={NAME}=replicate`" in error
    assert "with REF" in run("fits", "--where", "step > 1", "-l", layout, "--source", "a=1", code=2).stderr
    assert "--against" in run("layout", "check", layout, "--source", "a=1", code=2).stderr


def test_the_python_names_them_as_it_takes_them(place: Path, layout: Path) -> None:
    for act in (
        lambda **o: ucformat.open(place, **o),
        lambda **o: ucformat.verify(place, **o),
        lambda **o: ucformat.fits(place, layout, **o),
    ):
        with pytest.raises(AmbiguousLayout) as failure:
            act()
        assert "ucformat.open(…, options={'layout': ucformat.Layout.load(file)})" in str(failure.value)
        assert "--source" not in str(failure.value)
        act(options={"cuts": {"*adapter*": "replicate"}})


def test_the_spelling_ends_with_the_command() -> None:
    with spelling_options(lambda name, value, text: f"{name}:{value}:{text}"):
        assert option_text("optimizer") == "optimizer:False:false"
    assert option_text("vocab", "7") == "ucformat.open(…, options={'vocab': 7})"
