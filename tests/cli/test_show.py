"""`ucp show`: what a checkpoint holds, for people, for scripts and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cli.conftest import object_of
from tests.fakes import ODD, FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.cli.show import _list
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.convert import convert
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Run


def test_the_summary_says_what_there_is(run: Run, committed: Path) -> None:
    text = run("show", committed).stdout
    lines = text.splitlines()
    assert lines[0] == str(committed)
    assert "  kind      universal, of fake 1" in lines
    assert "  step      1,700" in lines
    assert "  layout    zero 3, dp 3" in lines
    assert "  tied      head.weight = embed.weight" in lines
    assert "  group 0   1 tensor: lr 0.1" in lines  # what is unset is left out
    assert "  objects   scheduler, client_state" in lines
    assert next(line for line in lines if line.startswith("total")).split()[1:] == [
        str(len(ODD)),
        f"{sum(a.size for a in ODD.values()):,}",
        f"{sum(a.nbytes for a in ODD.values()) / 1024:.1f}",
        "KiB",
    ]


def test_json_has_everything(run: Run, committed: Path) -> None:
    found = object_of(run("show", committed, "--json").stdout)
    assert list(found) == [
        "url", "kind", "id", "step", "engine", "layout", "states", "total", "aliases", "groups", "objects", "assets",
        "zarr_url",
    ]  # fmt: skip
    assert found["kind"] == "ucformat"
    assert found["step"] == 1700
    assert found["total"]["bytes"] == sum(a.nbytes for a in ODD.values())
    assert found["groups"][0] == {"params": ["embed.weight"], "options": {"lr": 0.1, "foreach": None}}
    assert found["groups"][1]["options"]["lr"] == {"$float": "inf"}
    assert found["zarr_url"].startswith(f"{committed}/data/")


def test_tensors_are_listed_by_glob_and_state(run: Run, committed: Path) -> None:
    found = object_of(run("show", committed, "-t", "embed*", "-s", "master", "--json").stdout)
    assert found["tensors"] == [
        {"name": "embed.weight", "state": "master", "dtype": "float32", "shape": [211, 30], "bytes": 25320}
    ]
    lines = run("show", committed, "--tensors", "experts.*", "-t", "norm.bias").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "norm.bias", "experts.w1", "experts.w2"]
    assert "4 x 24 x 40" in lines[2]
    assert run("show", committed, "-q", "-t", "*.w?").stdout == "experts.w1\nexperts.w2\n"
    assert run("show", committed, "-q", "-s", "step").stdout == "embed.weight\n"


def test_a_tied_name_finds_the_stored_tensor(run: Run, committed: Path) -> None:
    assert run("show", committed, "-q", "-t", "head.*").stdout == "embed.weight\n"


def test_what_is_not_there_is_said(run: Run, committed: Path, tmp_path: Path) -> None:
    assert "matches 'nope*'" in run("show", committed, "-t", "nope*", code=3).stderr
    assert "hint: there are: weight, master" in run("show", committed, "-s", "momentum", code=2).stderr
    assert run("show", tmp_path, code=3).stdout == ""


def test_a_terminal_sees_lines_that_fit_and_a_pipe_full_names(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.decoder.layers.17.mixture_of_experts.experts.local_experts.3.linear_fc1.weight"
    tensors = [TensorInfo(name, s, "float32", (28672, 8192)) for s in ("master", "exp_avg")]
    full = list(_list(tensors))
    assert full[1].startswith(name)
    assert full[2].startswith(name)
    monkeypatch.setattr("ucformat.cli.show.terminal_width", lambda: 80)
    short = list(_list(tensors))
    assert all(len(line) <= 80 for line in short)
    assert short[1].startswith("model.decoder.laye….linear_fc1.weight ")
    assert short[2].startswith("   ")


def test_a_name_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    evil = "a\x1b[31m\nb\u202e"
    arrays = {(evil, "weight"): random_array((2,), "int8")}
    convert(Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), arrays)), tmp_path / "dst")
    for options in (["-t", "*"], ["-q"]):
        text = run("show", tmp_path / "dst", *options).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "a\\x1b[31m\\nb" in text
