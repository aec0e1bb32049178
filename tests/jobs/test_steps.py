"""The training step of checkpoints whose files do not tell it: given, else from a name such as checkpoint-500."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from ucformat.errors import UsageError
from ucformat.jobs.record import step_in_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a model whose name has the step."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "own.db"))
    found = tmp_path / "run" / "checkpoint-500"
    found.mkdir(parents=True)
    save_file({"w": np.zeros(3, "float32")}, found / "model.safetensors")
    return found


def test_names_that_tell_a_step() -> None:
    told = {
        "checkpoint-500": 500,
        "global_step10": 10,
        "iter_0000100": 100,
        "run/step-00000007": 7,
        "a-step=3.ckpt": 3,
    }
    assert {name: step_in_name(name) for name in told} == told
    for name in ("checkpoint", "v2", "run7", "llama-3", "checkpoint-500-merged", "misstep-4"):
        assert step_in_name(name) is None, name


def test_the_name_tells_it_unless_it_is_given(place: Path, tmp_path: Path) -> None:
    with ucformat.Catalog() as catalog:
        ucformat.register(place, catalog)
        assert catalog.get("run@500").url == str(place)
        assert ucformat.convert(place, tmp_path / "a").manifest.step == 500
        assert ucformat.convert(place, tmp_path / "b", step=7).manifest.step == 7
        assert ucformat.convert(tmp_path / "b", tmp_path / "checkpoint-9").manifest.step == 7
        with pytest.raises(UsageError, match="one checkpoint"):
            ucformat.register(place.parent, catalog, recursive=True, step=3)
        with pytest.raises(UsageError, match="universal"):
            ucformat.register(tmp_path / "b", catalog, step=3)


def test_one_that_has_no_step_gets_it(place: Path) -> None:
    other = place.rename(place.parent / "model")
    with ucformat.Catalog() as catalog:
        ucformat.register(other, catalog)
        assert [e.name for e in catalog.find()] == ["model"]
        ucformat.register(other, catalog, step=12)
        assert [e.name for e in catalog.find()] == ["run@12"]
